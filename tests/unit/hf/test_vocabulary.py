"""Models with different tokens for an id are recognised, as far as their files show it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig

from corolla.hf.vocabulary import require_same_vocabulary
from tests.checkpoints import make_tokenizer

MakeConfig = Callable[..., LlamaConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    def make(name: str = "", *, added: tuple[str, ...] = (), size: int = 320, file: str = "") -> LlamaConfig:
        config = LlamaConfig(vocab_size=size)
        if name:
            config.name_or_path = str(tmp_path / name)
            tokenizer = make_tokenizer()
            tokenizer.add_tokens(list(added))
            tokenizer.save_pretrained(tmp_path / name)
            if file:
                (tmp_path / name / "tokenizer.json").write_text(file)
        return config

    return make


def test_equal_tokenizers_may_be_padded_differently(make_config: MakeConfig) -> None:
    require_same_vocabulary(make_config("one"), make_config("two"))
    require_same_vocabulary(make_config("one"), make_config("two", size=512))


@pytest.mark.parametrize("added", [("<more>",), ("<more>", "<still more>")])
def test_other_tokens_are_refused_although_the_sizes_agree(make_config: MakeConfig, added: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"`small_model` has another tokenizer .* in token \d+"):
        require_same_vocabulary(make_config("one"), make_config("two", added=added))
    with pytest.raises(ValueError, match="another tokenizer"):
        require_same_vocabulary(make_config("one", added=added), make_config("two", added=("<less>",)))


def test_models_without_a_tokenizer_are_compared_by_size(make_config: MakeConfig) -> None:
    unreadable = make_config("broken", file="{")
    for other in (make_config(), unreadable):
        require_same_vocabulary(make_config("one"), other)
        require_same_vocabulary(other, make_config("one"))
    with pytest.raises(ValueError, match="has 321 tokens and the model 320"):
        require_same_vocabulary(make_config("one"), make_config(size=321))
