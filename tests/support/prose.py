"""What programs and documents say in words."""

import io
import re
import tokenize
from pathlib import Path


def prose(path: Path) -> str:
    """Comments and docstrings of a program, comments of a TOML file, else the whole text."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return "\n".join(
            token.string
            for token in tokens
            if token.type == tokenize.COMMENT
            or (token.type == tokenize.STRING and token.string.endswith('"""'))
        )
    if path.suffix == ".toml":
        return "\n".join(re.findall(r"#.*", text))
    return text
