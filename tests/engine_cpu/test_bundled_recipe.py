"""The recipe of the bundled model: noising, schedules, export, and a run of a few seconds."""

import random
from pathlib import Path

import pytest
import torch

from stepserve.engine.bundled.batches import Row, make_batch, make_row, noise
from stepserve.engine.bundled.export import CONFIG, export_model
from stepserve.engine.bundled.tasks import MIX
from stepserve.engine.bundled.train import Settings, new_model, rate_at, shares_at, train
from stepserve.engine.bundled.vocabulary import EOS, MASK, SUPPRESSED, build_tokenizer
from stepserve.engine.loader import load_model


def _settings(out: Path, **changes: object) -> Settings:
    return Settings(**{"minutes": 1.0, "processes": 1, "seed": 0, "out": out, **changes})


def test_rows_end_in_eos_fill() -> None:
    rng, tokenizer = random.Random(0), build_tokenizer()
    for _ in range(200):
        row = make_row(tokenizer, rng, MIX)
        assert row.canvas[row.answer - 1 :] == [EOS] * (len(row.canvas) - row.answer + 1)
        assert EOS not in row.canvas[: row.answer - 1]
        assert len(row.canvas) % 8 == 0
        assert len(row.canvas) <= 128


def test_noise_masks_where_the_loss_is_and_behind_a_noisy_block() -> None:
    rng = random.Random(1)
    row = Row([3, 4], list(range(10, 58)), 40)
    block_states = 0
    for _ in range(300):
        masked, lossy = noise(row, rng.random(), rng)
        assert any(lossy)
        assert all(m for m, has_loss in zip(masked, lossy, strict=True) if has_loss)
        if masked != lossy:
            block_states += 1
            last = max(i for i, has_loss in enumerate(lossy) if has_loss)
            first_without_loss = min(
                i for i, (m, has) in enumerate(zip(masked, lossy, strict=True)) if m and not has
            )
            assert first_without_loss > last
            assert all(masked[first_without_loss:])
    assert block_states > 50


def test_batch_keeps_prompts_and_shows_only_masks_at_loss() -> None:
    rng, tokenizer = random.Random(2), build_tokenizer()
    rows = [make_row(tokenizer, rng, MIX) for _ in range(16)]
    batch = make_batch(rows, rng)
    for index, row in enumerate(rows):
        assert batch.inputs[index, : len(row.prompt)].tolist() == row.prompt
        assert int(batch.valid[index].sum()) == row.length
        assert not batch.weights[index, : len(row.prompt)].any()
    assert (batch.inputs[batch.weights > 0] == MASK).all()
    assert 0.1 < float(batch.weights.sum()) <= 1.0 + 1e-5


def test_schedules_start_and_end_where_they_say(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    assert rate_at(settings, 0, 0.0) < settings.peak_rate / 100
    assert rate_at(settings, 5000, 0.3) == settings.peak_rate
    assert rate_at(settings, 5000, 1.0) == pytest.approx(0.02 * settings.peak_rate)
    assert shares_at(1.0) == pytest.approx(MIX)
    assert sum(shares_at(0.5).values()) == pytest.approx(1.0)


def test_export_is_read_back_by_the_loader(tmp_path: Path) -> None:
    model = new_model(seed=3)
    export_model(dict(model.named_parameters()), build_tokenizer(), tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == CONFIG
    assert set(SUPPRESSED) <= set(loaded.suppressed_token_ids)
    for name, weight in loaded.model.named_parameters():
        expected = model.get_parameter(name).detach().half().float()
        assert torch.equal(weight, expected), name


def test_a_short_run_resumes_and_exports(tmp_path: Path) -> None:
    settings = _settings(tmp_path, minutes=0.1, rows_per_update=16)
    folder = train(settings)
    first = torch.load(tmp_path / "state.pt", weights_only=True)
    assert first["update"] > 0
    train(_settings(tmp_path, minutes=0.2, rows_per_update=16, resume=True))
    second = torch.load(tmp_path / "state.pt", weights_only=True)
    assert second["update"] > first["update"]
    assert load_model(folder).config == CONFIG


def test_rows_that_processes_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows_per_update"):
        train(_settings(tmp_path, processes=3, rows_per_update=64))
