"""Result records as text: for the terminal, as JSON, as a model card and as one HTML page. Nothing here knows tensors.

A package for each kind of result (`convert`, `probe`, `bench`, `finetune`), and beside them what they share. Each holds
what there is of `terminal` (rich), `html` (jinja2), `card` (Markdown), `plot` and `words`.
"""
