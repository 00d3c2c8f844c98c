"""The transformers connector as a server uses it: layers that arrive while the model computes,
batches with padding, sliding windows, what is lost on the way, identities that engines share.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from flashkv import Options
from flashkv.errors import IdentityError, MemoryViewError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_llama import config, go_on, make_model, open_store  # noqa: E402

from flashkv.connectors.transformers import (  # noqa: E402
    BLOCK_TOKENS,
    PrefixCache,
    PrefixLostError,
    UnsupportedModelError,
)
from flashkv.connectors.transformers_layers import reads_of  # noqa: E402

BLOCKS = 5
TOKENS = BLOCKS * BLOCK_TOKENS + 21


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def prompt():
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, (1, TOKENS)))


def in_memory(prefix, model, ids, restored):
    """A cache with what the model computes in the pieces that a restored one is made of."""
    cache = prefix.new_cache()
    if restored:
        model(input_ids=ids[:, :restored], cache=cache, use_cache=True)
    return cache


# ---- one sequence, layers that arrive ----


@pytest.mark.parametrize("layers", range(1, 40))
def test_reads_cover_the_layers_in_order(layers):
    reads = reads_of(layers)
    assert [layer for part in reads for layer in part] == list(range(layers))
    assert len(reads[0]) == 1


def test_prefill_restores_computes_and_stores(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        first = PrefixCache(store, model, salt=b"first").prefill(prompt)
        assert (first.restored, first.saved.stored) == (0, BLOCKS)
        prefix = PrefixCache(store, model)
        # Stored as computed in the same pieces: bits depend on how a prompt is cut.
        prefix.save(in_memory(prefix, model, prompt, BLOCKS * BLOCK_TOKENS), prompt)
        again = PrefixCache(store, model).prefill(prompt)
        assert (again.restored, again.saved.blocks) == (BLOCKS * BLOCK_TOKENS, 0)
        cache = in_memory(prefix, model, prompt, again.restored)
        expected = model(input_ids=prompt[:, again.restored :], cache=cache, use_cache=True)
        assert torch.equal(again.output.logits, expected.logits)
        token = again.output.logits[0, -1].argmax()
        assert go_on(model, token[None, None], again.cache) == go_on(
            model, token[None, None], cache
        )
        assert store.stats().leases == 0
        assert store.stats().tickets_inflight == 0


def test_a_longer_prompt_stores_its_tail_with_its_parents(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        short = prompt[:, : 2 * BLOCK_TOKENS + 1]
        assert prefix.prefill(short).saved.stored == 2
        longer = prefix.prefill(prompt)
        assert (longer.restored, longer.saved.stored) == (2 * BLOCK_TOKENS, BLOCKS - 2)
        assert prefix.prefill(prompt).restored == BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("others", [False, True])
def test_a_bound_on_bytes_in_flight_stops_nobody(tmp_path, model, prompt, others):
    """One transfer at a time fits; of the other's that go on meanwhile, none does."""
    gate, tight = threading.Event(), Options(inflight_bytes=1)
    with open_store(tmp_path / "store", model, options=tight) as store, store.client() as client:
        prefix = PrefixCache(store, model)
        alone = prefix.prefill(torch.cat([prompt, prompt]))
        assert alone.saved.failed == 0
        if others:
            for write in (True, False, False):
                client.submit("block", gate.wait, write=write)
            memory = np.zeros((1, 1 << 20), np.uint8)
            client.submit_get(prefix.namespace, [b"any"], memory)
            client.submit_put(prefix.namespace, [b"any"], memory)
            threading.Timer(0.5, gate.set).start()
        again = prefix.prefill(torch.cat([prompt, prompt]))
        assert again.restored == BLOCKS * BLOCK_TOKENS
        assert torch.equal(
            again.output.logits[:, -1].argmax(-1), alone.output.logits[:, -1].argmax(-1)
        )
        assert store.stats().busy_gets > 0
        gate.set()


def test_generate_goes_on_from_a_prefilled_cache(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        prefix.prefill(prompt)
        cache, restored = prefix.restore(prompt, wait=False)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        text = model.generate(prompt, cache=cache, **options)
        computed = in_memory(prefix, model, prompt, restored)
        assert torch.equal(text, model.generate(prompt, cache=computed, **options))


def test_nobody_sees_a_layer_before_it_is_there(tmp_path, model, prompt, monkeypatch):
    """Every read is held up; whatever looks at a layer waits for it."""
    import threading

    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        whole = prefix.prefill(prompt).cache
        may_go = threading.Event()
        ask = prefix.namespace.ask

        def slow(*arguments):
            may_go.wait(20)
            return ask(*arguments)

        monkeypatch.setattr(prefix.namespace, "ask", slow)
        cache, restored = prefix.restore(prompt, wait=False)
        assert cache.get_seq_length() == restored  # without waiting
        seen = []
        looker = threading.Thread(target=lambda: seen.append(cache.layers[2].values.clone()))
        looker.start()
        looker.join(0.2)
        assert not seen
        may_go.set()
        looker.join(20)
        assert torch.equal(seen[0], whole.layers[2].values[:, :, :restored])


def lose(store, prefix, prompt, monkeypatch, layer):
    """Reads of that layer fail from now on."""
    ask = prefix.namespace.ask

    def failing(keys, out, options):
        keys = np.array(keys)
        if options.layers is not None and layer in options.layers:
            keys[len(keys) // 2] ^= 0xFF  # a key of nothing
        return ask(keys, out, options)

    monkeypatch.setattr(prefix.namespace, "ask", failing)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_what_is_lost_on_the_way_is_computed(tmp_path, model, prompt, monkeypatch, layer):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        expected = prefix.prefill(prompt)
        lose(store, prefix, prompt, monkeypatch, layer)
        cache, restored = prefix.restore(prompt, wait=False)
        with pytest.raises(PrefixLostError, match=f"layer {layer}"):
            model(input_ids=prompt[:, restored:], cache=cache, use_cache=True)
        again = prefix.prefill(prompt)
        assert again.restored == 0
        assert torch.equal(again.output.logits, expected.output.logits)
        for mine, other in zip(again.cache.layers, expected.cache.layers, strict=True):
            assert torch.equal(mine.keys, other.keys)
            assert torch.equal(mine.values, other.values)
        assert store.stats().leases == 0
        assert prefix._client().open_tickets == 0


def test_a_model_that_fails_leaves_nothing_open(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        prefix.prefill(prompt)
        with pytest.raises(TypeError):
            prefix.prefill(prompt, no_such_option_of_forward=object(), logits_to_keep="?")
        assert prefix._client().open_tickets == 0
        assert prefix.prefill(prompt).restored == BLOCKS * BLOCK_TOKENS


# ---- batches ----


def batch_of(rng, lengths):
    """(ids, mask), padded on the left with zeros."""
    width = max(lengths)
    ids = torch.zeros((len(lengths), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.from_numpy(rng.integers(1, 256, length))
        mask[row, width - length :] = 1
    return ids, mask


def text_of(model, done, mask, count=8):
    """Greedy tokens of every row after a prefill."""
    rows = []
    output, cache = done.output, done.cache
    for _ in range(count):
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
        rows.append(tokens)
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        positions = mask.sum(1, keepdim=True) - 1
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
        )
    return torch.cat(rows, 1).tolist()


@pytest.mark.parametrize("lengths", [(300, 300), (300, 201, 77), (130, 321), (65, 64, 200, 1)])
def test_a_padded_batch_goes_on_as_its_rows_alone(tmp_path, model, lengths):
    ids, mask = batch_of(np.random.default_rng(len(lengths)), lengths)
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        alone = []
        for row, length in enumerate(lengths):
            one = ids[row : row + 1, ids.shape[1] - length :]
            alone += text_of(model, prefix.prefill(one), torch.ones_like(one))
        # The rows' own blocks serve the batch up to the shortest common column.
        done = prefix.prefill(ids, mask)
        expected = min(
            ids.shape[1] - length + (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            for length in lengths
        )
        assert done.restored == min(expected, ids.shape[1] - 1)
        assert text_of(model, done, mask) == alone


def test_a_batch_stores_for_its_rows(tmp_path, model):
    lengths = (300, 201, 77)
    ids, mask = batch_of(np.random.default_rng(3), lengths)
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        done = prefix.prefill(ids, mask)
        assert done.saved.stored == sum(length // BLOCK_TOKENS for length in lengths)
        for row, length in enumerate(lengths):
            cache, restored = prefix.restore(ids[row, ids.shape[1] - length :])
            assert restored == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            first = ids.shape[1] - length
            for layer, whole in zip(cache.layers, done.cache.layers, strict=True):
                columns = slice(first, first + restored)
                assert torch.equal(layer.keys[0], whole.keys[row, :, columns])
                assert torch.equal(layer.values[0], whole.values[row, :, columns])
        assert prefix.save(done.cache, ids, mask).present == done.saved.stored


def test_one_cold_row_keeps_the_batch_cold(tmp_path, model):
    ids, mask = batch_of(np.random.default_rng(4), (200, 200))
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        prefix.prefill(ids[:1])
        cache, restored = prefix.restore(ids, mask)
        assert (restored, cache.get_seq_length()) == (0, 0)


def test_a_hole_in_one_row_shortens_all(tmp_path, model):
    ids, mask = batch_of(np.random.default_rng(5), (300, 250))
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        done = prefix.prefill(ids, mask)
        keys = prefix.namespace.token_keys(ids[1, 50:].numpy(), block_tokens=BLOCK_TOKENS)
        assert prefix.namespace.delete(keys[2:3]).all_ok
        cache, restored = prefix.restore(ids, mask)
        assert restored == 50 + 2 * BLOCK_TOKENS
        for layer, whole in zip(cache.layers, done.cache.layers, strict=True):
            assert torch.equal(layer.keys[0], whole.keys[0, :, :restored])
            assert torch.equal(layer.values[1, :, 50:], whole.values[1, :, 50:restored])
            assert not layer.keys[1, :, :50].any()


@pytest.mark.parametrize(
    ("ids", "mask", "said"),
    [
        ([[1, 2], [3, 4]], [[1, 0], [1, 1]], "on the left"),
        ([[1, 2], [3, 4]], [[1, 1, 1]], "another shape"),
        ([[[1]]], None, "ints of one sequence"),
        ([0.5, 1.5], None, "ints of one sequence"),
    ],
)
def test_what_is_no_batch_is_said(tmp_path, model, ids, mask, said):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        with pytest.raises(MemoryViewError, match=said):
            prefix.restore(np.array(ids), None if mask is None else np.array(mask))


def test_rows_and_cache_must_agree(tmp_path, model, prompt):
    with open_store(tmp_path / "store", model) as store:
        prefix = PrefixCache(store, model)
        done = prefix.prefill(torch.cat([prompt, prompt]))
        with pytest.raises(MemoryViewError, match="number of rows"):
            prefix.save(done.cache, prompt)


# ---- other kinds of models ----


def windowed(kind, **changes):
    """A random model whose layers look back 96 tokens only, all of them or every second one."""
    torch.manual_seed(0)
    values = config().to_dict()
    for name in ("model_type", "architectures", "transformers_version", "dtype"):
        values.pop(name, None)
    made = {
        "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig),
        "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig),
    }[kind]
    if kind == "gemma3":
        values = {name: values[name] for name in ("vocab_size", "hidden_size", "head_dim")}
        values |= {
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "eos_token_id": None,
            "bos_token_id": None,
        }
    return made[0](made[1](**{**values, "sliding_window": 96, **changes})).eval()


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_sliding_windows(tmp_path, prompt, kind):
    """It goes on as with transformers' own cache, which drops what is out of sight."""
    sliding = windowed(kind)
    with open_store(tmp_path / "store", sliding) as store:
        prefix = PrefixCache(store, sliding)
        prefix.prefill(prompt)
        done = prefix.prefill(prompt)
        assert done.restored == BLOCKS * BLOCK_TOKENS
        own = transformers.DynamicCache(config=sliding.config)
        assert any(layer.is_sliding for layer in own.layers)
        sliding(input_ids=prompt[:, : done.restored], cache=own, use_cache=True)
        output = sliding(input_ids=prompt[:, done.restored :], cache=own, use_cache=True)
        torch.testing.assert_close(done.output.logits, output.logits, rtol=1e-4, atol=1e-4)
        token = output.logits[0, -1].argmax()[None, None]
        assert go_on(sliding, token, done.cache) == go_on(sliding, token, own)


def test_the_window_counts(tmp_path, prompt):
    """The same weights with another window give other numbers, and another identity."""
    with open_store(tmp_path / "store", windowed("mistral")) as store:
        PrefixCache(store, windowed("mistral")).prefill(prompt)
        other = PrefixCache(store, windowed("mistral", sliding_window=64))
        assert other.restore(prompt)[1] == 0


def test_states_are_refused(tmp_path):
    mamba = transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, mamba_d_ssm=32,
            mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        )
    )  # fmt: skip
    with (
        open_store(tmp_path / "store", mamba) as store,
        pytest.raises(UnsupportedModelError, match=r"layer 0 .* something else"),
    ):
        PrefixCache(store, mamba)


# ---- an identity that other engines share ----


@pytest.fixture
def folder(tmp_path, model):
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_a_checkpoint_is_the_same_wherever_it_lies(tmp_path, model, folder, prompt):
    moved = tmp_path / "elsewhere" / "checkpoint"
    moved.parent.mkdir()
    folder.rename(moved)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(moved)
    with open_store(tmp_path / "store", model) as store:
        PrefixCache(store, loaded, checkpoint=moved).prefill(prompt)
        moved.rename(folder)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert PrefixCache(store, again, checkpoint=folder).restore(prompt)[1] > 0
        assert PrefixCache(store, again).restore(prompt)[1] == 0  # the identity of the memory


def test_what_was_changed_since_is_no_checkpoint(tmp_path, model, folder, prompt):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with open_store(tmp_path / "store", model) as store:
        PrefixCache(store, loaded, checkpoint=folder).prefill(prompt)
        loaded.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
        assert PrefixCache(store, loaded, checkpoint=folder).restore(prompt)[1] == 0
        other = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for weight in other.parameters():
            weight.mul_(1.01)
        with pytest.raises(UnsupportedModelError, match="not the checkpoint's"):
            PrefixCache(store, other, checkpoint=folder)
        (folder / "config.json").unlink()
        with pytest.raises((IdentityError, OSError)):
            PrefixCache(store, loaded, checkpoint=folder)
        with pytest.raises(UnsupportedModelError, match="no weight of the model"):
            PrefixCache(store, loaded, checkpoint=tmp_path)
