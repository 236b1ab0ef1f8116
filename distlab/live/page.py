"""The page: one document that fetches nothing but snapshots of its own server, and holds nothing that acts on a run.

It is templates/live.html beside the report's. The policy names the script and the style by their hashes, so that
nothing else on the page could run.
"""

import base64
import hashlib

from distlab.report.html import asset, render

STYLE = asset("page.css") + asset("live.css")


def hashed(text: str) -> str:
    """How a policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {hashed(asset('live.js'))}; style-src {hashed(STYLE)}; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page() -> str:
    """The whole document."""
    return render("live.html", style=STYLE)
