"""Result records as text: for the terminal, as JSON, as a model card and as one HTML page. Nothing here knows tensors.

A package for each kind of result (`convert`, `probe`, `bench`, `finetune`), and beside them what they share: `numbers`
and `printable` (text), `terminal` (rich), `page`, `plot` and `heat` (jinja2). Each holds what there is of `terminal`,
`html` (the page with its plots), `card` (Markdown) and `words`; a result with nothing but a table is one module.
"""
