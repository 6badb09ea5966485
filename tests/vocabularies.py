"""Small vocabularies in the files of their publishers, and what the publishers' libraries answered for texts.

They are kept in `golden/tokenizers.json`: `by` names the libraries, which were asked in an environment of their own.
"""

import base64
import json
from pathlib import Path
from typing import Any, Final

from tests.golden import FOLDER

GOLDEN: Final[dict[str, Any]] = json.loads((FOLDER / "tokenizers.json").read_text(encoding="utf-8"))
KIMI: Final = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}


def tiktoken_folder(folder: Path, **settings: Any) -> Path:
    lines = [f"{token} {rank}\n" for rank, token in enumerate(GOLDEN["ranks"])]
    (folder / "tiktoken.model").write_text("".join(lines))
    settings = {"auto_map": KIMI, "added_tokens_decoder": GOLDEN["special_tokens"], **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tekken_folder(folder: Path, **changes: Any) -> Path:
    vocabulary = [{"rank": rank, "token_bytes": token} for rank, token in enumerate(GOLDEN["ranks"])]
    (folder / "tekken.json").write_text(json.dumps({**GOLDEN["tekken"], "vocab": vocabulary, **changes}))
    return folder


def sentencepiece_folder(folder: Path) -> Path:
    (folder / "tokenizer.model").write_bytes(base64.b64decode(GOLDEN["pieces"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    return folder
