"""Result records as text: for the terminal, as JSON, as a model card and as one HTML page. Nothing here knows tensors.

Import the module you need: `terminal` (rich), `document` (JSON), `card` (Markdown), `html` (jinja2).
"""
