"""Imported by the server that conversions are forked from: what each would import or compile again, done once."""

from report_examples import bert_result

import lpconv.cli.progress
import lpconv.convert.verify_written
import lpconv.convert.weights
import lpconv.report.convert.terminal  # noqa: F401
from lpconv.report.convert.html import html_report

html_report(bert_result(), {})  # jinja compiles its templates, which takes five times as long as a small conversion
