"""Report of the sweep: per peer the worst cases, bins, gaps and times."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.sweep import CAPS, COSTS, OBJECTIVES, RANKS, SIZES

TITLES = {"rank": "Rank total, plain data parallelism", "lockstep": "Lockstep, experts shared by all ranks"}
ANYTHING, A_TENTH_OF_A_PERCENT = 1e-9, 1e-3


def verdict(ours: dict, theirs: dict) -> str:
    """Whether a peer's plan is comparable with ours, or the reason why not."""
    if "limit" in theirs:
        return "over the time limit"
    if "refused" in theirs:
        return "refused"
    if theirs["missing"]:
        return "not all placed"
    if theirs["over"]:
        return "over the cap"
    return "larger K" if theirs["K"] > ours["K"] else "beside ours"


VERDICTS = ("beside ours", "larger K", "over the cap", "not all placed", "refused", "over the time limit")


def pairs(rows: list[dict], axis: str) -> list[dict]:
    """Comparable plans on more than one rank; `ahead` is the share of our cost that the peer saves."""
    found = []
    for row in rows:
        if row["case"]["ranks"] == 1:
            continue
        ours = row["ours"][OBJECTIVES[axis]]
        for peer, theirs in row["peers"].items():
            kind = verdict(ours, theirs)
            ahead = 1 - theirs[axis] / ours[axis] if axis in theirs else 0.0
            found.append(
                {"case": row["case"], "peer": peer, "verdict": kind, "ahead": ahead, "ours": ours, "theirs": theirs}
            )
    return found


def by_case(beside: list[dict]) -> dict[tuple, float]:
    """Largest `ahead` of any peer, by case."""
    most: dict[tuple, float] = {}
    for pair in beside:
        key = tuple(pair["case"].values())
        most[key] = max(most.get(key, 0.0), pair["ahead"])
    return most


def figures(rows: list[dict]) -> list[dict]:
    """Figures of `--sweep --check`, as rows of `Checks`."""
    found = []

    def at_most(name: str, value: float, limit: float) -> None:
        found.append({"figure": name, "found": value, "limit": f"<= {limit:g}", "holds": value <= limit})

    for axis in OBJECTIVES:
        beside = [pair for pair in pairs(rows, axis) if pair["verdict"] == "beside ours"]
        most = list(by_case(beside).values())
        at_most(f"{axis}: cases with a peer ahead by more than 0.1%", sum(a > A_TENTH_OF_A_PERCENT for a in most), 0)
        at_most(f"{axis}: share of cases with a peer ahead", share(most, ANYTHING), 0.005)
        plans = [row["ours"][OBJECTIVES[axis]] for row in rows]
        at_most(
            f"{axis}: our packs over the cap or sequences not placed", sum(p["over"] + p["missing"] for p in plans), 0
        )
    wide = [row for row in rows if row["case"]["n"] >= 32 * row["case"]["ranks"] > 32]
    gaps = [gap(row["ours"]["auto"], "rank") for row in wide]
    if gaps:
        at_most("rank: median gap to the lower bound, n >= 32 x ranks", statistics.median(gaps), 0.0005)
    return found


def share(values: list[float], above: float) -> float:
    return sum(value > above for value in values) / len(values) if values else 0.0


def gap(plan: dict[str, Any], axis: str) -> float:
    return plan[axis] / plan["bound"] - 1


def show_sweep(rows: list[dict], commits: dict[str, str], limit: float, every: int, worst: int = 20) -> None:
    sources = sorted({(row["case"]["source"], row["case"]["seed"]) for row in rows})
    names = {Path(source).stem: [seed for other, seed in sources if other == source] for source, _ in sources}
    some = f"one of {every}" if every > 1 else "all"
    print(f"{len(rows)} cases ({some}) of the grid: n {SIZES}, ranks {RANKS}, caps {CAPS}, costs {tuple(COSTS)}")
    print("lengths (seeds; of a file, batches): " + "; ".join(f"{n} {min(s)} to {max(s)}" for n, s in names.items()))
    print(f"peers, each at most {limit:g} s of processor time per case:")
    for name, commit in commits.items():
        print(f"- {name} at {commit[:12]}")
    for axis in OBJECTIVES:
        show_axis(rows, axis, worst)
    show_bins(rows)
    show_gaps(rows)
    show_times(rows)


def show_axis(rows: list[dict], axis: str, worst: int) -> None:
    found = pairs(rows, axis)
    print(f"\n{TITLES[axis]}: cases of more than one rank, by peer")
    print(f"| peer | cases | {' | '.join(VERDICTS)} | ahead by > 0.1% | ahead at all | ahead at larger K |")
    print("|---" * (len(VERDICTS) + 5) + "|")
    for peer in dict.fromkeys(pair["peer"] for pair in found):
        of = [pair for pair in found if pair["peer"] == peer]
        counts = [sum(pair["verdict"] == kind for pair in of) for kind in VERDICTS]
        ahead = [pair["ahead"] for pair in of if pair["verdict"] == "beside ours"]
        later = [pair["ahead"] for pair in of if pair["verdict"] == "larger K"]
        print(
            f"| {peer} | {len(of)} | {' | '.join(map(str, counts))} | {sum(a > A_TENTH_OF_A_PERCENT for a in ahead)} | "
            f"{sum(a > ANYTHING for a in ahead)} | {sum(a > A_TENTH_OF_A_PERCENT for a in later)} |"
        )
    beside = [pair for pair in found if pair["verdict"] == "beside ours"]
    smaller = sum(pair["theirs"]["K"] < pair["ours"]["K"] for pair in beside)
    most = by_case(beside)
    print(
        f"any peer: ahead by more than 0.1% in {sum(a > A_TENTH_OF_A_PERCENT for a in most.values())} and at all in "
        f"{sum(a > ANYTHING for a in most.values())} of {len(most)} cases; plans with a smaller K than ours: {smaller}"
    )
    for source in sorted({key[0] for key in most}):
        here = [ahead for key, ahead in most.items() if key[0] == source]
        counts = [sum(a > least for a in here) for least in (A_TENTH_OF_A_PERCENT, ANYTHING)]
        print(f"- {Path(source).stem}: {counts[0]} and {counts[1]} of {len(here)}")
    other = next(name for name in OBJECTIVES if name != axis)
    print(f"\n{TITLES[axis]}: the {worst} cases in which a peer is furthest ahead")
    print(f"| lengths | n | ranks | cap | cost | peer | ahead by | its {axis} | ours | K | ours | its {other} | ours |")
    print("|---" * 13 + "|")
    for pair in worst_pairs(beside)[:worst]:
        case, ours, theirs = pair["case"], pair["ours"], pair["theirs"]
        print(
            f"| {Path(case['source']).stem} {case['seed']} | {case['n']} | {case['ranks']} | {case['cap']} "
            f"| {case['cost']} | {pair['peer']} | {100 * pair['ahead']:.2g}% | {theirs[axis]:.5f} | {ours[axis]:.5f} "
            f"| {theirs['K']} | {ours['K']} | {theirs[other]:.4f} | {ours[other]:.4f} |"
        )


def worst_pairs(beside: list[dict]) -> list[dict]:
    """Cases with a peer ahead, largest `ahead` first, each with its best peer."""
    found: dict[tuple, dict] = {}
    for pair in sorted(beside, key=lambda pair: -pair["ahead"]):
        if pair["ahead"] > ANYTHING:
            found.setdefault(tuple(pair["case"].values()), pair)
    return list(found.values())


def behind(rows: list[dict]) -> dict[str, list[dict]]:
    """By objective, all cases with a peer ahead, largest `ahead` first."""
    return {
        axis: worst_pairs([pair for pair in pairs(rows, axis) if pair["verdict"] == "beside ours"])
        for axis in OBJECTIVES
    }


def show_bins(rows: list[dict]) -> None:
    """Print the number of bins on one rank, of peers and of our packers."""
    single = [row for row in rows if "bins" in row]
    print("\nBins of all sequences (plans on one rank): batches in which a peer needs fewer than ours, or more")
    print('| peer | batches | fewer than "best" | more | fewer than MFFD | more | fewer than our plan | more |')
    print("|---" * 8 + "|")
    for peer in single[0]["peers"] if single else ():
        placed = [row for row in single if row["peers"][peer].get("over") == row["peers"][peer].get("missing") == 0]
        theirs = np.array([row["peers"][peer]["K"] for row in placed])
        ours = (
            np.array([row["bins"]["best"] for row in placed]),
            np.array([row["bins"]["modified_first_fit_decreasing"] for row in placed]),
            np.array([row["ours"]["auto"]["K"] for row in placed]),
        )
        cells = " | ".join(f"{(theirs < bins).sum()} | {(theirs > bins).sum()}" for bins in ours)
        print(f"| {peer} | {len(placed)} | {cells} |")


def show_gaps(rows: list[dict]) -> None:
    print("\nGap of our plans to the lower bound that their report gives, more than one rank")
    print("| axis | n / ranks | cases | median | 90% | 99% | largest |\n|---|---|---|---|---|---|---|")
    for axis, layout in OBJECTIVES.items():
        for low, high in ((32, 1 << 20), (8, 32), (1, 8)):
            gaps = [
                gap(row["ours"][layout], axis)
                for row in rows
                if row["case"]["ranks"] > 1 and low <= row["case"]["n"] / row["case"]["ranks"] < high
            ]
            if gaps:
                some = " | ".join(f"{100 * np.quantile(gaps, q):.3f}%" for q in (0.5, 0.9, 0.99, 1))
                label = f"{low} and more" if high > 32 else f"{low} to {high - 1}"
                print(f"| {axis} | {label} | {len(gaps)} | {some} |")


def show_times(rows: list[dict]) -> None:
    print("\nMilliseconds of processor time on more than one rank (median, 90%, largest), by n")
    print(f"| planner | {' | '.join(f'n {n:,}' for n in SIZES)} |")
    print("|---" * (len(SIZES) + 1) + "|")
    planners: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["case"]["ranks"] == 1:
            continue
        timed = {f"ours, {layout}": plan for layout, plan in row["ours"].items()} | row["peers"]
        for name, plan in timed.items():
            if "seconds" in plan:
                planners.setdefault(name, []).append((row["case"]["n"], 1000 * plan["seconds"]))
    for name, timed in planners.items():
        cells = []
        for n in SIZES:
            some = [ms for size, ms in timed if size == n]
            cells.append(", ".join(f"{np.quantile(some, q):.3g}" for q in (0.5, 0.9, 1)) if some else "-")
        print(f"| {name} | {' | '.join(cells)} |")
