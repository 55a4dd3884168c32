"""What programs of `benchmarks.gpu` are asked on the command line."""

from __future__ import annotations

import argparse

import torch


def device_and_size(description: str | None) -> tuple[torch.device, bool]:
    """The device to measure, and whether a tiny network is enough, to see that the program runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny network, to see that it runs")
    options = parser.parse_args()
    return torch.device(options.device), options.small
