"""One training step of a diffusion UNet: eager, with its blocks as regions, and compiled under a budget.

    python examples/diffusion_unet.py

Needs diffusers (pip install "remat[models]"); the weights are random, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import time

import torch
from diffusers import DDPMScheduler, UNet2DModel

import remat

MIB = 2**20


def main() -> None:
    """Run the same step three ways; print measured activation peaks and what they cost in time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="50%", help="of the compiled step (%(default)s)")
    parser.add_argument("--pixels", type=int, default=32, help="width and height of the images (%(default)s)")
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(1)

    torch.manual_seed(0)
    images = torch.randn(4, 3, arguments.pixels, arguments.pixels)
    eager, regions, compiled = make_model(), make_model(), make_model()
    for pattern in ("down_blocks.*.resnets.*", "mid_block.resnets.*", "up_blocks.*.resnets.*"):
        remat.apply(regions, pattern)
    compiled.compile(backend="remat", options={"inner": "aot_eager", "memory_budget": arguments.budget})
    ways = {"eager": eager, "regions": regions, f"compiled, budget {arguments.budget}": compiled}
    for name, model in ways.items():
        peak = remat.observe(denoising_loss, model, images).measured.activation_bytes
        start = time.perf_counter()
        loss = denoising_loss(model, images)
        loss.backward()
        seconds = time.perf_counter() - start
        print(f"{name:22} activation peak {peak / MIB:7.1f} MiB, {seconds:.2f} s, loss {loss.item():.6f}", flush=True)
    print(f"done in {time.perf_counter() - started:.0f} s")


def make_model() -> UNet2DModel:
    """A UNet of two levels, the lower one with attention."""
    torch.manual_seed(1)
    return UNet2DModel(
        in_channels=3, out_channels=3, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def denoising_loss(model: UNet2DModel, images: torch.Tensor) -> torch.Tensor:
    """Predict the noise that was added to images."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(images.shape, generator=generator)
    steps = torch.randint(1000, (len(images),), generator=generator)
    noisy = DDPMScheduler().add_noise(images, noise, steps)
    return torch.nn.functional.mse_loss(model(noisy, steps).sample, noise)


if __name__ == "__main__":
    main()
