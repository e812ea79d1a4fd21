"""The report as one HTML file that opens offline: no request leaves it, and what it holds is text, never code."""

from foretell.report.html.page import Page, html_page
from foretell.report.html.sensitivity import Variation, variations

__all__ = ["Page", "Variation", "html_page", "variations"]
