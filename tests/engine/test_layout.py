"""The arithmetic of flat spaces, without processes."""

import pytest
import torch

from lightning_zero3.layout import ALIGN, Layout

SHAPES = {"bias": (15,), "weight": (15, 7), "gain": (), "filter": (3, 4, 2, 2), "empty": (0,)}


@pytest.fixture
def named():
    g = torch.Generator().manual_seed(0)
    return [(name, torch.randn(shape, generator=g)) for name, shape in SHAPES.items()]


def test_matrices_come_first_and_everything_is_aligned(named):
    layout = Layout.of(named)
    assert [s.name for s in layout.spans] == ["weight", "filter", "bias", "gain", "empty"]
    assert all(s.start % ALIGN == 0 for s in layout.spans)
    assert layout.numel % ALIGN == 0


def test_views_hold_what_was_put_in_and_padding_stays_zero(named):
    layout = Layout.of(named)
    flat = torch.zeros(layout.numel)
    for span in layout.spans:
        span.view(flat).copy_(dict(named)[span.name])
    for span in layout.spans:
        assert torch.equal(span.view(flat), dict(named)[span.name])
    padding = sum(hi - lo for lo, hi in layout.gaps(layout.numel))
    assert padding == layout.numel - sum(t.numel() for _, t in named)
    assert all(not flat[lo:hi].any() for lo, hi in layout.gaps(layout.numel))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 64])
def test_chunks_cover_the_space_and_overlaps_tile_each_parameter(named, world):
    layout = Layout.of(named)
    size = layout.chunk_size(world)
    assert size % ALIGN == 0
    assert size * world >= layout.numel
    for span in layout.spans:
        parts = [span.overlap(r * size, (r + 1) * size) for r in range(world)]
        covered = [i for part in parts for i in range(part.start, part.stop)]
        assert covered == list(range(span.numel))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(3, 1, 4).transpose(0, 2),
        torch.randn(5).expand(3, 5),  # overlaps itself: becomes contiguous
        torch.randn(8, 8)[:, ::2],  # has holes: becomes contiguous
    ],
    ids=["channels_last", "transposed", "size one", "expanded", "strided"],
)
def test_memory_order_is_kept_where_it_can_be(tensor):
    (span,) = Layout.of([("w", tensor)]).spans
    flat = torch.zeros(64 * 8)
    span.view(flat).copy_(tensor)
    assert torch.equal(span.view(flat), tensor)
    assert torch.equal(span.flatten(tensor), flat[span.start : span.stop])
    if tensor.untyped_storage().nbytes() == tensor.numel() * 4:
        assert span.view(flat).stride() == tensor.stride()
