"""Train what a YAML file says, given by its folder and name as ROLL's launcher takes them:

python examples/start_dpo_pipeline.py --config_path examples/quickstart --config_name dpo max_steps=20

The same as `rather train examples/quickstart/dpo.yaml max_steps=20`. As in ROLL, the folder may also
be relative to examples/: --config_path quickstart.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def config_file(folder: str, name: str) -> Path:
    """Return the YAML: from the current folder, this folder (as in ROLL), or the repository's root."""
    file = Path(folder) / (name if name.endswith(".yaml") else f"{name}.yaml")
    places = (file, REPOSITORY / "examples" / file, REPOSITORY / file)
    return next((place for place in places if place.is_file()), file)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train what a YAML file says.")
    parser.add_argument("--config_path", required=True, help="folder of the YAML file")
    parser.add_argument("--config_name", required=True, help="its name, without .yaml")
    parser.add_argument("overrides", nargs="*", help="key=value, such as max_steps=200 beta=0.05")
    arguments = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))  # so that a checkout works before it is installed
    from rather.cli import train_from_config
    from rather.errors import RatherError

    file = config_file(arguments.config_path, arguments.config_name)
    try:
        return train_from_config(file, arguments.overrides)
    except RatherError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
