"""Reads a checkpoint's tokenizer from the file that its publisher gives, without running the checkpoint's code.

Most checkpoints have a `tokenizer.json`, which transformers reads. Without it, the vocabulary is a list of ranks
(`tiktoken.model` of Kimi, `tekken.json` of Mistral) or of pieces with scores (`tokenizer.model` of sentencepiece).
"""

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
from transformers.integrations.mistral.tokenizer import MistralConverter
from transformers.utils import sentencepiece_model_pb2_new

from corolla.chassis.errors import CheckpointError

TIKTOKEN_FILE: Final = "tiktoken.model"
TEKKEN_FILE: Final = "tekken.json"
SENTENCEPIECE_FILE: Final = "tokenizer.model"
PROCESSOR_TEMPLATE_FILE: Final = "chat_template.json"
"""The template of a model that sees, where its tokenizer has none."""

_MOST_BYTES: Final = 128 << 20
_MOST_TOKENS: Final = 1 << 20
# Each way to cut a token in two is tried, so the work grows with the square of its length.
_MOST_TOKEN_BYTES: Final = 1 << 10
_MOST_TOTAL_BYTES: Final = 1 << 24
# Merges are made of every way to cut a token into two others. Gemma 3's 262,144 tokens take 0.28 of this.
_MOST_MERGE_BYTES: Final = 1 << 27
_MERGE_BYTES: Final = 64
_SPACE: Final = "▁"
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Reads the tokenizer of a checkpoint folder, without the network.

    Raises:
        CheckpointError: its file is damaged, or of a kind that is not known here.
        Exception: transformers cannot read it; its parsers raise many classes.
    """
    folder = Path(folder)
    name = next((each for each in _READERS if (folder / each).is_file()), None)
    if name is None or (folder / "tokenizer.json").is_file():
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    else:
        loaded = _of_folder(folder, name, _READERS[name])
    if loaded.chat_template is None and (file := folder / PROCESSOR_TEMPLATE_FILE).is_file():
        loaded.chat_template = _template_of_processor(file)
    return cast(PreTrainedTokenizerBase, loaded)


def _template_of_processor(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["chat_template"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read; fetch it again.") from error


def tokenizer_text(hf_tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A tokenizer in the form of `tokenizer.json`, with added tokens of other files, without padding and truncation.

    None: it has no such form.
    """
    if not isinstance(hf_tokenizer, PreTrainedTokenizerFast):
        return None
    backend = type(hf_tokenizer.backend_tokenizer).from_str(hf_tokenizer.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def tokenizer_of_pieces(vocabulary: Mapping[str, Any], architecture: str = "llama") -> Tokenizer:
    """A tokenizer that merges characters by the scores of pieces, as sentencepiece and llama.cpp do.

    Args:
        vocabulary: `tokens`, `scores`, `token_type` and `add_prefix_space`, by transformers' names for a GGUF file.
        architecture: that of a GGUF file.

    Raises:
        ValueError: its merges would take far more memory than the vocabulary.
    """
    _check_merges([token.encode() for token in vocabulary["tokens"]])
    convert: Any = convert_gguf_tokenizer  # untyped in transformers
    backend, _ = convert(architecture, {**vocabulary, "tokenizer_type": "llama"})
    # Each stretch of text between special tokens gets a space in front, in sentencepiece and llama.cpp, too.
    has_prefix = bool(vocabulary.get("add_prefix_space", True))
    spelling = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spelling] if has_prefix else spelling)
    backend.pre_tokenizer = None
    pieces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*pieces, decoders.Strip(" ", 1, 0)] if has_prefix else pieces)
    return cast(Tokenizer, backend)


def _of_folder(
    folder: Path, name: str, read: Callable[[Path, Mapping[str, Any]], tuple[Tokenizer, dict[str, str]]]
) -> PreTrainedTokenizerFast:
    path, settings = folder / name, dict[str, Any]()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("the file is too large")
        if (file := folder / "tokenizer_config.json").is_file():
            settings = json.loads(file.read_text(encoding="utf-8"))
        backend, specials = read(path, settings)
        given = {each: _text(settings[each]) for each in _SPECIAL_TOKENS if settings.get(each) is not None}
        specials = {key: text for key, text in {**specials, **given}.items() if backend.token_to_id(text) is not None}
        template = settings.get("chat_template")
        if (file := folder / "chat_template.jinja").is_file():
            template = file.read_text(encoding="utf-8")
        if settings.get("add_bos_token", name != TIKTOKEN_FILE) and (bos := specials.get("bos_token")) is not None:
            single = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
            backend.post_processor = single
        options: dict[str, Any] = {**specials, "chat_template": template}
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **options)
    except CheckpointError:
        raise
    except Exception as error:  # parsers of json, protobuf and tokenizers raise many unrelated classes
        raise CheckpointError(f"{path} cannot be read; fetch it again, or give the model's tokenizer.json.") from error


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _check(tokens: list[bytes]) -> None:
    if not all(tokens):
        raise ValueError("a token is empty")
    if len(set(tokens)) != len(tokens):
        raise ValueError("two tokens are the same")


def _check_merges(tokens: list[bytes]) -> None:
    """Refuses tokens that are made of each other in so many ways that a small file would take gigabytes."""
    if len(tokens) > _MOST_TOKENS:
        raise ValueError("there are too many tokens")
    lengths = [len(token) for token in tokens]
    if max(lengths, default=0) > _MOST_TOKEN_BYTES or sum(lengths) > _MOST_TOTAL_BYTES:
        raise ValueError("a token is too long, or all together are")
    known, left = set(tokens), _MOST_MERGE_BYTES
    for token in tokens:
        cuts = range(1, len(token))
        num_merges = sum(1 for cut in cuts if token[:cut] in known and token[cut:] in known)
        left -= num_merges * (_MERGE_BYTES + len(token))
        if left < 0:
            raise ValueError("tokens are made of each other in too many ways")


# --- ranks ------------------------------------------------------------------------------------------------------------

# How the code of Kimi's checkpoints cuts texts before it merges bytes: Chinese characters apart, otherwise as GPT-4o.
_LARGE: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI_CUTS: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_KIMI_CODE: Final = "tokenization_kimi.TikTokenTokenizer"
# Ids of special tokens behind the ranks, whether tokenizer_config.json names them or not.
_NUM_KIMI_SPECIALS: Final = 258


class _Ranks(TikTokenConverter):
    """transformers' converter without the package tiktoken, which it would read the file by."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        ranks: dict[bytes, int] = {}
        for line in Path(tiktoken_url).read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        _check(list(ranks))
        _check_merges(list(ranks))
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError("the ranks are not 0, 1, 2 and so on")
        return ranks


def _of_tiktoken(path: Path, settings: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    own = settings.get("auto_map")
    named = own.get("AutoTokenizer") if isinstance(own, Mapping) else own
    if _KIMI_CODE not in (named if isinstance(named, list) else [named]):
        raise CheckpointError(
            f"{path} does not say how texts are cut, and the checkpoint's code, which would, is never run; give a "
            f"tokenizer.json. Only files for {_KIMI_CODE} are known."
        )
    named_tokens = {int(number): token for number, token in (settings.get("added_tokens_decoder") or {}).items()}
    convert: Any = _Ranks  # untyped in transformers
    backend = convert(str(path), pattern=_KIMI_CUTS).converted()
    first = backend.get_vocab_size()
    for number in range(first, first + _NUM_KIMI_SPECIALS):
        token = named_tokens.get(number, f"<|reserved_token_{number}|>")
        is_special = bool(token.get("special", True)) if isinstance(token, Mapping) else True
        added = AddedToken(_text(token), normalized=False, special=is_special)
        (backend.add_special_tokens if is_special else backend.add_tokens)([added])
    if backend.get_vocab_size() != first + _NUM_KIMI_SPECIALS:
        raise ValueError("two special tokens are the same, or a rank spells one")
    return backend, {"bos_token": "[BOS]", "eos_token": "[EOS]"}


def _of_tekken(path: Path, _settings: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("special_tokens") is None:
        raise CheckpointError(
            f"{path} is of the first kind, which does not name its special tokens; give the model's tokenizer.json."
        )
    tokens = [base64.b64decode(each["token_bytes"], validate=True) for each in stored["vocab"]]
    _check(tokens)
    _check_merges(tokens)
    if not 0 <= int(stored["config"].get("default_num_special_tokens") or 0) <= _MOST_TOKENS:
        raise ValueError("there are too many special tokens")
    convert: Any = MistralConverter  # untyped in transformers
    return convert(str(path)).converted(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


# --- pieces -----------------------------------------------------------------------------------------------------------

_MERGES: Final = 2
"""The type of a sentencepiece model that merges pieces by their scores."""


def _of_sentencepiece(path: Path, settings: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, str]]:
    model = cast(Any, sentencepiece_model_pb2_new).ModelProto()
    model.ParseFromString(path.read_bytes())
    tokens = [piece.piece for piece in model.pieces]
    _check([token.encode() for token in tokens])
    trained, normal = model.trainer_spec, model.normalizer_spec
    if trained.model_type != _MERGES or normal.precompiled_charsmap or normal.remove_extra_whitespaces:
        raise CheckpointError(
            f"{path} is a sentencepiece model of another kind than those that merge pieces and leave characters as "
            "they are; give the model's tokenizer.json."
        )
    vocabulary = {
        "tokens": tokens, "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces], "add_prefix_space": normal.add_dummy_prefix,
    }  # fmt: skip
    backend = tokenizer_of_pieces(vocabulary)
    for number, token in sorted((settings.get("added_tokens_decoder") or {}).items(), key=lambda each: int(each[0])):
        if int(number) >= len(tokens):
            backend.add_special_tokens([AddedToken(_text(token), normalized=False, special=True)])
            if backend.token_to_id(_text(token)) != int(number):
                raise ValueError("the numbers of added tokens do not follow those of the pieces")
    ids = {"bos_token": trained.bos_id, "eos_token": trained.eos_id, "unk_token": trained.unk_id}
    return backend, {name: tokens[number] for name, number in ids.items() if 0 <= number < len(tokens)}


_READERS: Final = {
    TIKTOKEN_FILE: _of_tiktoken, TEKKEN_FILE: _of_tekken, SENTENCEPIECE_FILE: _of_sentencepiece
}  # fmt: skip
"""Vocabularies of checkpoints without a tokenizer.json, in the order in which they are looked for."""
