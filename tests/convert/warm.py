"""Imported by the server that conversions are forked from: what each would import or compile again, done once."""

from report_examples import bert_result

import lpconv.cli.progress
import lpconv.convert.verify_written
import lpconv.convert.weights
import lpconv.report.terminal  # noqa: F401
from lpconv.report.convert import convert_document
from lpconv.report.html import html

html(
    convert_document(bert_result())
)  # jinja compiles its templates, which takes five times as long as a small conversion
