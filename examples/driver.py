"""A driver script: the same run as `rayrec train` then `rayrec evaluate`, from Python.

    python examples/driver.py DATA RUN

DATA is a data set that `rayrec prepare` and `rayrec tokenize` have written. With RAY_ADDRESS set, or inside
`ray job submit`, it joins that cluster; otherwise it starts one and stops it at the end.
"""

import argparse
import sys

import rayrec
from rayrec.platform import InputError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("run")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    config = rayrec.RunConfig.parse(
        {
            "data": {"path": arguments.data},
            "model": {"name": "light_decoder", "backbone": {"dim": 64, "max_length": 100, "dropout": 0.3}},
            "sparse": {"num_servers": 2, "optimizer": {"kind": "adam", "lr": 0.002}},
            "training": {"batch_size": 32, "epochs": arguments.epochs, "optimizer": {"learning_rate": 0.002}},
            "evaluation": {"every_epochs": 5},
        }
    )
    result = rayrec.train(config, arguments.run)
    print(f"{result.steps} steps, {result.best_metric} {result.best_value:.4f} on validation users")

    report = rayrec.evaluate(arguments.run)
    for ranking, metrics in report.results.items():
        print(f"{ranking:>28}: recall@10 {metrics['recall@10'].value:.4f}")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"driver: {error}")
