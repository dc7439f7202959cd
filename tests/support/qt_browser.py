"""The Chromium inside PyQt6-WebEngine with one page and no screen, for chromedriver to attach to.

Run by an interpreter that has the package: ``python qt_browser.py PORT [CHROMIUM FLAGS]``.
"""

import os
import sys

from PyQt6.QtCore import QUrl  # pyright: ignore[reportMissingImports]
from PyQt6.QtWebEngineCore import qWebEngineChromiumVersion  # pyright: ignore[reportMissingImports]
from PyQt6.QtWebEngineWidgets import QWebEngineView  # pyright: ignore[reportMissingImports]
from PyQt6.QtWidgets import QApplication  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QTWEBENGINE_REMOTE_DEBUGGING"] = sys.argv[1]
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = " ".join(sys.argv[2:])
    application = QApplication(sys.argv[:1])
    # chromedriver attaches to what calls itself Chrome, of its own version.
    application.setApplicationName("Chrome")
    application.setApplicationVersion(qWebEngineChromiumVersion())
    view = QWebEngineView()  # its profile is in memory only
    view.load(QUrl("about:blank"))
    view.show()
    sys.exit(application.exec())
