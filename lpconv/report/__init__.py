"""Result records described as documents, and documents laid out; nothing here knows tensors.

- `document` and `charts` are what a description is made of, without any layout.
- A file for each kind of result builds its `Document`: `convert`, `verify`, `inspect`, `finetune`, `probe`, `bench`,
  `advise`, `batch`, `export`, `memory`, `doctor`, `compare` (several runs, and an index of a folder) and `cards` (model
  cards). Files that begin with the same word hold their sentences, tables and charts.
- `terminal`, `html` with `drawing`, and `markdown` lay out any document and know no kind of result.
- `numbers` writes figures, and `printable` makes texts from files safe to print.
"""
