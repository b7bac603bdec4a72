"""Chromium, in which the tests open pages."""

from __future__ import annotations

import os

NEEDS_CHROMIUM = "pages are opened in Chromium: apt-get install chromium chromium-driver"
"""Why tests are skipped that find none; .ci/run looks for it."""
FLAGS = (
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),  # root has no other way
)
"""They keep it from asking anything but the page, and let root start it in a container."""
