"""Imports and compiled templates of the process that conversions are forked from."""

from lpconv.report.convert import convert_document
from lpconv.report.html import html
from tests.helpers.report_examples import bert_result

html(
    convert_document(bert_result())
)  # jinja compiles its templates, which takes five times as long as a small conversion
