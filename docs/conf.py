"""How the documentation is built: `scripts/docs`.

Sphinx, not MkDocs: it takes the reference from docstrings and signatures, checks every link between
pages and names, and warnings are errors here.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from daso.version import __version__  # noqa: E402

project, author, release = "daso", "daso developers", __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "generated",
]
exclude_patterns = ["_ext"]
default_role = "code"
smartquotes = False  # "--resume" and quoted names stay as they are typed

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 72
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
napoleon_use_rtype = False
napoleon_preprocess_types = False

html_math_renderer = "mathml"
html_show_copyright = False
html_theme = "furo"
html_title = f"daso {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {"navigation_with_keys": True}
