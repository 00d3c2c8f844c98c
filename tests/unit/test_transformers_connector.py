"""The transformers connector on a tiny random Llama: restored prefixes go on as if never stored."""

from __future__ import annotations

import numpy as np
import pytest

import flashkv
from flashkv.errors import GeometryError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_llama import go_on, make_model, open_store  # noqa: E402

from flashkv.connectors.transformers import (  # noqa: E402
    BLOCK_TOKENS,
    PrefixCache,
    UnsupportedModelError,
)

PREFIX_TOKENS = 5 * BLOCK_TOKENS
PROMPT_TOKENS = PREFIX_TOKENS + 21


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def prompt():
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, (1, PROMPT_TOKENS)))


def prefill(prefix, model, prompt):
    cache = prefix.new_cache()
    model(input_ids=prompt[:, :PREFIX_TOKENS], cache=cache, use_cache=True)
    return cache


def test_continuation_is_the_same_after_a_reopen(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        cache = prefill(prefix, model, prompt)
        expected_kv = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        expected = go_on(model, prompt[:, PREFIX_TOKENS:], cache)
        # The cache holds generated tokens by now; only the tokens given are stored.
        report = prefix.save(cache, prompt[:, :PREFIX_TOKENS])
        assert (report.blocks, report.stored, report.present, report.failed) == (5, 5, 0, 0)
        assert report.tokens == PREFIX_TOKENS
        assert report.offered_bytes == 2 * 3 * 2 * 16 * 4 * PREFIX_TOKENS
    with flashkv.open(tmp_path / "store") as store:
        cache, restored = PrefixCache(store, model).restore(prompt)
        assert restored == PREFIX_TOKENS
        assert cache.get_seq_length() == PREFIX_TOKENS
        for layer, (keys, values) in zip(cache.layers, expected_kv, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
        assert go_on(model, prompt[:, PREFIX_TOKENS:], cache) == expected


def test_a_longer_text_restores_what_it_shares(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        prefix.save(prefill(prefix, model, prompt), prompt)
        other = prompt.clone()
        other[0, 2 * BLOCK_TOKENS + 5] += 1
        other[0, 2 * BLOCK_TOKENS + 5] %= 256
        _, restored = prefix.restore(other)
        assert restored == 2 * BLOCK_TOKENS
        longer = torch.cat([prompt[:, :PREFIX_TOKENS], other, other], dim=1)
        assert prefix.restore(longer)[1] == PREFIX_TOKENS
        assert prefix.restore(prompt[:, 1:])[1] == 0


def test_saving_twice_stores_the_new_tail_only(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        cache = prefill(prefix, model, prompt)
        assert prefix.save(cache, prompt[:, : 3 * BLOCK_TOKENS + 7]).stored == 3
        report = prefix.save(cache, prompt)
        assert (report.blocks, report.stored, report.present) == (5, 2, 3)


def test_the_last_token_is_left_to_the_model(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        prefix.save(prefill(prefix, model, prompt), prompt)
        assert prefix.restore(prompt[:, :PREFIX_TOKENS])[1] == PREFIX_TOKENS - BLOCK_TOKENS
        assert prefix.restore(prompt[:, : PREFIX_TOKENS + 1])[1] == PREFIX_TOKENS
        for count in (0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS):
            cache, restored = prefix.restore(prompt[:, :count])
            assert restored == 0
            assert cache.get_seq_length() == 0


def test_ids_may_be_lists_arrays_or_tensors(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        prefix.save(prefill(prefix, model, prompt), prompt[0].tolist())
        for ids in (prompt[0], prompt.numpy(), prompt[0].numpy().astype(np.int32)):
            assert prefix.restore(ids)[1] == PREFIX_TOKENS


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16])
def test_a_cache_may_be_narrower_than_the_model(tmp_path, model, prompt, cache_dtype):
    with open_store(tmp_path / "store", model, cache_dtype) as store:
        prefix = PrefixCache(store, model, kv_dtype=cache_dtype)
        cache = prefill(prefix, model, prompt)
        assert cache.layers[0].keys.dtype == cache_dtype
        expected = go_on(model, prompt[:, PREFIX_TOKENS:], cache)
        prefix.save(cache, prompt[:, :PREFIX_TOKENS])
        cache, restored = prefix.restore(prompt)
        assert restored == PREFIX_TOKENS
        assert go_on(model, prompt[:, PREFIX_TOKENS:], cache) == expected


def hits(store, model, prompt, **identity):
    return PrefixCache(store, model, **identity).restore(prompt)[1]


def test_what_changes_the_numbers_never_meets(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model, salt=b"tenant a", revision="r1", name="tiny")
        prefix.save(prefill(prefix, model, prompt), prompt)
        same = {"salt": b"tenant a", "revision": "r1", "name": "tiny"}
        assert hits(store, model, prompt, **same) == PREFIX_TOKENS
        assert hits(store, make_model(), prompt, **same) == PREFIX_TOKENS
        assert hits(store, model, prompt, **{**same, "salt": b"tenant b"}) == 0
        assert hits(store, model, prompt, **{**same, "salt": b""}) == 0
        assert hits(store, model, prompt, **{**same, "revision": "r2"}) == 0
        assert hits(store, model, prompt, **{**same, "name": "other"}) == 0
        assert hits(store, model, prompt, **same, adapter="lora-1") == 0
        assert hits(store, make_model(seed=1), prompt, **same) == 0
        assert hits(store, make_model(rope_theta=5e5), prompt, **same) == 0
        assert hits(store, make_model(rms_norm_eps=1e-5), prompt, **same) == 0
        assert hits(store, make_model(dtype=torch.bfloat16), prompt, kv_dtype=torch.float32) == 0


def test_one_changed_weight_matrix_is_another_model(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        prefix.save(prefill(prefix, model, prompt), prompt)
        tuned = make_model()
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        assert hits(store, tuned, prompt) == 0


def test_a_store_of_another_dtype_is_refused(tmp_path, model):
    with (
        open_store(tmp_path / "store", model) as store,
        pytest.raises(GeometryError, match="float32"),
    ):
        PrefixCache(store, make_model(dtype=torch.float16))


def test_a_foreign_cache_is_refused(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        static = transformers.StaticCache(config=model.config, max_cache_len=512)
        with pytest.raises(UnsupportedModelError, match="StaticLayer"):
            prefix.save(static, prompt)


def test_an_empty_cache_stores_nothing(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        assert prefix.save(prefix.new_cache(), prompt).blocks == 0
        assert store.stats().blocks == 0


def test_a_hole_ends_the_prefix(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        prefix.save(prefill(prefix, model, prompt), prompt)
        keys = prefix.namespace.token_keys(prompt[0].numpy(), block_tokens=BLOCK_TOKENS)
        assert prefix.namespace.delete(keys[3:4]).all_ok
        cache, restored = prefix.restore(prompt)
        assert restored == cache.get_seq_length() == 3 * BLOCK_TOKENS


def test_damage_ends_the_prefix_and_what_is_restored_is_right(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model, options=flashkv.Options(codec="raw")) as store:
        prefix = PrefixCache(store, model)
        original = prefill(prefix, model, prompt)
        prefix.save(original, prompt)
        store.flush()
        segment = next((tmp_path / "store" / "shards" / "0" / "segments").glob("*.seg"))
        # The raw bits of one of the last block's keys, wherever the layout put them.
        vector = original.layers[0].keys[0, 0, PREFIX_TOKENS - 1].numpy().tobytes()
        place = segment.read_bytes().find(vector)
        assert place > 0
        with segment.open("r+b") as file:
            file.seek(place)
            file.write(bytes(len(vector)))
        cache, restored = prefix.restore(prompt)
        assert restored == PREFIX_TOKENS - BLOCK_TOKENS
        assert store.stats().damaged_blocks == 1
        for layer, whole in zip(cache.layers, original.layers, strict=True):
            assert torch.equal(layer.keys, whole.keys[:, :, :restored])
            assert torch.equal(layer.values, whole.values[:, :, :restored])
        # Stored again, it is there again.
        assert prefix.save(original, prompt).stored == 1
        assert prefix.restore(prompt)[1] == PREFIX_TOKENS


@pytest.mark.gpu
def test_a_prefix_moves_through_a_gpu(tmp_path, model, prompt):
    on_gpu = make_model().to("cuda")
    with open_store(tmp_path / "store", on_gpu) as store:
        prefix = PrefixCache(store, on_gpu)
        cache = prefill(prefix, on_gpu, prompt.to("cuda"))
        prefix.save(cache, prompt)
        restored_cache, restored = prefix.restore(prompt)
        assert restored == PREFIX_TOKENS
        for layer, stored in zip(restored_cache.layers, cache.layers, strict=True):
            assert layer.keys.device.type == "cuda"
            assert torch.equal(layer.keys, stored.keys)
            assert torch.equal(layer.values, stored.values)
        # The same weights on the processor have the same identity.
        assert hits(store, model, prompt) == PREFIX_TOKENS
