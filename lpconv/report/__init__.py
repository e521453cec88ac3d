"""Turn result records into documents, and documents into text, HTML and Markdown. Nothing here handles tensors.

- `document` and `charts` are the parts of a document, without any layout.
- A file for each kind of result builds its `Document` with its sentences, tables and charts: `convert`, `verify`,
  `inspect`, `finetune`, `probe`, `bench`, `advise`, `batch`, `export`, `doctor`, `compare`
  (several runs, and an index of a folder) and `cards` (model cards).
- `tensors` and `tensor_charts` are tables and charts of tensors, for conversions and verifications.
- `terminal`, `html` with `drawing`, and `markdown` render any document and know no kind of result.
- `numbers` formats numbers, and `printable` makes text from files safe to print.
"""
