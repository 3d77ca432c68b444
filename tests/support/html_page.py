"""A page of HTML, as a browser would read it."""

from __future__ import annotations

import html.parser


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
