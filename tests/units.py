"""Made-up units of a faithfulness run, in which the order of the metrics is known."""

import numpy as np
import pandas as pd

STRENGTHS = {
    "attention": 1.0,
    "contribution": 2.0,
    "twin": 2.0,
    "gradient": 2.4,
    "random": 0.1,
}
AREA = "AOPC"
FRACTIONS = (0.1, 0.3, 0.5, 0.9)


def made_up_units(
    strengths: dict[str, float] = STRENGTHS,
    *,
    data: tuple[str, ...] = ("texts",),
    granularities: tuple[str, ...] = ("layer",),
    protected: tuple[str, ...] = ("cosine",),
    examples: int = 12,
    seeds: int = 3,
    no_op: bool = True,
) -> pd.DataFrame:
    """One row per unit; a stronger metric harms more, or less where the lowest are removed.

    Two metrics of equal strength get equal losses, whatever their names.
    """
    rows = []
    for corpus in data:
        draw = np.random.default_rng(0)
        tokens = draw.integers(20, 200, size=examples)
        clean = draw.normal(3.3, 0.3, size=examples) * (tokens - 1)
        noise = draw.normal(1, 0.2, size=(examples, len(FRACTIONS), seeds))
        for example in range(examples):
            predicted = int(tokens[example]) - 1
            base = {
                "data": corpus,
                "example": example,
                "tokens": predicted + 1,
                "clean_nll_sum": float(clean[example]),
            }
            for granularity in granularities:
                for protection in protected:
                    for remove in ("highest", "lowest"):
                        where = base | {
                            "granularity": granularity,
                            "protected": protection,
                            "remove": remove,
                        }
                        if no_op:
                            rows.append(
                                where
                                | {"metric": "no_op", "ranking": "online", "fraction": 0.0}
                                | {"seed": 0, "removed": 0, "nll_sum": float(clean[example])}
                                | {"kl_sum": 0.0, "top1_agreed": predicted}
                            )
                        for metric, strength in strengths.items():
                            size = strength if remove == "highest" else 3 - strength
                            for place, fraction in enumerate(FRACTIONS):
                                for seed in range(seeds if metric == "random" else 1):
                                    change = size * fraction * noise[example, place, seed]
                                    rows.append(
                                        where
                                        | {"metric": metric, "fraction": fraction, "seed": seed}
                                        | {"ranking": "clean" if metric == "gradient" else "online"}
                                        | {"removed": int(100 * fraction)}
                                        | {"nll_sum": float(clean[example] + change * predicted)}
                                        | {"kl_sum": 0.5 * change * predicted}
                                        | {"top1_agreed": int(predicted * (1 - 0.3 * fraction))}
                                    )
    return pd.DataFrame(rows)


def one(table: pd.DataFrame, **where: object) -> pd.Series:
    """The one row of a table with these values; `AREA` is the fraction of an AOPC."""
    for column, value in where.items():
        table = table[table[column].isna() if value is AREA else table[column] == value]
    assert len(table) == 1, table
    return table.iloc[0]
