"""Opens a page in Qt's Chromium, without a screen.

Its arguments: URL WIDTH HEIGHT READY FACTS.
Prints the value of the expression FACTS as JSON once the expression READY is true, with the page's messages on the
console. The exit code is 77 if this machine lacks a library.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")  # it refuses root
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--disable-gpu")
CANT = 77


def main(url: str, width: str, height: str, ready: str, facts: str) -> None:
    try:
        from PyQt6.QtCore import QTimer, QUrl
        from PyQt6.QtWebEngineCore import QWebEnginePage
        from PyQt6.QtWebEngineWidgets import QWebEngineView
        from PyQt6.QtWidgets import QApplication
    except ImportError as exc:
        print(exc)
        sys.exit(CANT)

    console = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):
            console.append(message)

    app = QApplication(["browser"])
    view = QWebEngineView()
    page = Page(view)
    view.setPage(page)
    view.resize(int(width), int(height))
    view.show()

    def look(is_ready=False):
        if is_ready:
            page.runJavaScript(f"JSON.stringify({facts})", end)
        else:
            QTimer.singleShot(50, lambda: page.runJavaScript(ready, look))

    def end(answer):
        print(json.dumps({"console": console, "facts": json.loads(answer)}))
        app.quit()

    page.loadFinished.connect(lambda _: look())
    view.load(QUrl(url))
    app.exec()


if __name__ == "__main__":
    main(*sys.argv[1:])
