"""What run folders hold, held against what is written of it."""

from pathlib import Path

import pandas as pd

from cw_lens.views.columns import TABLES, meaning


def undefined(folder: Path) -> list[str]:
    """Tables of a run without a title, and columns whose meaning nobody wrote down."""
    missing = []
    for path in sorted(folder.glob("*.parquet")):
        if path.stem not in TABLES:
            missing.append(path.stem)
        columns = pd.read_parquet(path).columns
        missing += [f"{path.stem}.{name}" for name in columns if not meaning(path.stem, name)]
    return missing
