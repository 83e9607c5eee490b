"""The CPU operator against attention over a dense mask, forward and backward."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from muster.train.model.document_attention import COPIED_UP_TO, buckets, document_attention, padded_length


def dense(query, key, value, lengths, scale):
    """The same by one softmax over all tokens, with a mask."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens = torch.arange(sum(lengths))
    mask = (document[:, None] == document[None, :]) & (tokens[:, None] >= tokens[None, :])
    parts = [tensor.transpose(0, 1) for tensor in (query, key, value)]
    return scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale).transpose(0, 1)


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [5, 1, 17, 16, 3],
        [40, 2, 40],
        [COPIED_UP_TO + 3, 9, COPIED_UP_TO],
        [30, 0, 0],
        [16, 16, 16],
        [5, 16, 16, 3],
        [16, 5, 16],
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_dense_attention(lengths):
    torch.manual_seed(0)
    total = sum(lengths)
    tensors = [torch.randn(total, 2, 8, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    weights = torch.randn(total, 2, 8)
    results = []
    for kernel in (
        lambda: document_attention(*tensors, bounds, 0.3),
        lambda: dense(*tensors, [length for length in lengths if length], 0.3),
    ):
        output = kernel()
        results.append((output, *torch.autograd.grad((output * weights).sum(), tensors)))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=2e-5, rtol=1e-4)


def test_a_document_does_not_see_its_neighbours():
    torch.manual_seed(0)
    query, key, value = (torch.randn(30, 2, 8) for _ in range(3))
    bounds = torch.tensor([0, 10, 22, 30], dtype=torch.int32)
    before = document_attention(query, key, value, bounds, 1.0)[10:22].clone()
    key[:10] += 100.0
    value[22:] = float("nan")
    assert torch.equal(document_attention(query, key, value, bounds, 1.0)[10:22], before)


def test_bfloat16_and_strided_inputs():
    torch.manual_seed(0)
    packed = torch.randn(20, 3, 4, 8)
    query, key, value = (packed.bfloat16()[:, index] for index in range(3))
    bounds = torch.tensor([0, 7, 20], dtype=torch.int32)
    found = document_attention(query, key, value, bounds, 0.4)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), dense(*(packed[:, i] for i in range(3)), [7, 13], 0.4), atol=3e-2)


def test_padding_of_a_document_depends_on_its_own_length_alone():
    alone = {bucket.length for bucket in buckets((0, 20))}
    together = {bucket.length for bucket in buckets((0, 20, 21, 150))}
    assert alone == {24} and alone < together
    for length in range(1, COPIED_UP_TO + 1):
        assert length <= padded_length(length) < length + max(8, length / 4 + 1)


@pytest.mark.parametrize(
    ("bounds", "in_place"),
    [
        ((0, 64, 128), [(0, 2)]),
        ((0, 5, 21, 37), [(5, 2)]),
        ((0, 16, 21, 37), []),
        ((0, 15, 31), []),
        ((0, COPIED_UP_TO + 1, 2 * COPIED_UP_TO + 2), [(0, 1), (COPIED_UP_TO + 1, 1)]),
    ],
    ids=str,
)
def test_documents_one_behind_the_other_without_padding_are_not_copied(bounds, in_place):
    assert [(bucket.start, bucket.count) for bucket in buckets(bounds) if bucket.rows is None] == in_place


@pytest.mark.parametrize("lengths", [[16, 16], [16, 5], [5]], ids=str)
def test_a_token_of_no_document_has_zeros(lengths):
    tensors = [torch.randn(sum(lengths) + 3, 2, 8, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    output = document_attention(*tensors, bounds, 0.3)
    gradients = torch.autograd.grad(output.sum(), tensors)
    assert all(torch.equal(found[-3:], torch.zeros(3, 2, 8)) for found in (output, *gradients))


def test_the_operator_is_registered_whole():
    tensors = [torch.randn(16, 2, 4, requires_grad=True) for _ in range(3)]
    for inner in (5, 8):
        bounds = torch.tensor([0, inner, 16], dtype=torch.int32)
        torch.library.opcheck(torch.ops.muster.document_attention.default, (*tensors, bounds, 0.5))
