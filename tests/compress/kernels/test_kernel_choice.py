"""Every device gets kernels, and they all write the same bytes."""

from __future__ import annotations

import pytest
import torch

from tests.compress.gradients import make_gradient
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.kernels import kernel_choice as kernels_module
from torsh_distributed.compress.kernels.kernel_choice import compiled_kernels, kernels_for
from torsh_distributed.compress.kernels.torch_kernels import TorchKernels


def test_a_tensor_of_the_cpu_gets_the_compiled_kernels() -> None:
    compiled = compiled_kernels()
    if compiled is None:
        pytest.skip("the kernels were not built")
    assert kernels_for(torch.zeros(1)) is compiled
    assert isinstance(kernels_for(torch.zeros(1, device="meta")), TorchKernels)


@pytest.mark.parametrize("method", ["int8", "nbit:5", "sign", "ternary", "ternary:0", "bimodal:7", "natural"])
def test_a_codec_does_the_same_without_a_compiler(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_gradient("heavy", 5000, 1)
    payload = make_codec(method).encode(x, Key(step=3))
    decoded = make_codec(method).decode(payload, 5000, Key())
    monkeypatch.setattr(kernels_module, "compiled_kernels", lambda: None)
    assert isinstance(kernels_for(x), TorchKernels)
    assert torch.equal(make_codec(method).encode(x, Key(step=3)), payload)
    assert torch.equal(make_codec(method).decode(payload, 5000, Key()), decoded)
