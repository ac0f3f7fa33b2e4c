"""The schedule against a fake clock: tables of pass times, drafters of known acceptance, many seeds. No model runs."""

import itertools
from statistics import mean

import pytest
from dflash_hub import decode_schedule
from dflash_hub.decode_schedule import (
    ALLOWANCE,
    DraftSchedule,
    DraftStatistics,
    Samples,
    choose_num_draft,
    expected_tokens,
    is_at_floor,
    target_seconds,
)
from dflash_hub.experiments.schedule_simulation import DRAFTERS, TABLES, best_fixed, fading, mean_auto, simulate, steady

# ----------------------------------------------------------------------------------------- the bound and the optimum


@pytest.mark.parametrize("block_size", (8, 16))
@pytest.mark.parametrize("table", TABLES)
def test_never_three_per_cent_above_plain(table, block_size):
    """Over 200 tokens, in every run: useless, poor and middling drafters, and those that change in the middle."""
    for name, acceptance in DRAFTERS.items():
        for seed, noise in ((0, 0.0), (1, 0.03), (2, 0.03)):
            seconds, plain, drafts = simulate(table, acceptance, DraftSchedule(block_size), seed, noise=noise)
            assert seconds <= 1.03 * plain, (name, seed, noise, seconds / plain)
            assert any(drafts)  # it was tried


@pytest.mark.parametrize("table", TABLES)
def test_a_useless_drafter_stays_within_the_bound_call_after_call(table):
    memory = None
    for call in range(5):
        schedule = DraftSchedule(8, memory)
        seconds, plain, _ = simulate(table, steady(0.02), schedule, call)
        assert seconds <= 1.03 * plain, call
        memory = schedule.statistics


@pytest.mark.parametrize(
    ("table", "acceptance"),
    (
        ("GPU, light drafter", steady(0.7)),
        ("GPU, light drafter", steady(0.9)),
        ("GPU, usual drafter", steady(0.6)),
        ("GPU, usual drafter", steady(0.8)),
        ("GPU, usual drafter", fading(0.85, 0.9)),
        ("GPU, heavy drafter", steady(0.85)),
        ("GPU, tiles of four", steady(0.7)),
        ("CPU, fast", steady(0.8)),
        ("CPU, slow", steady(0.85)),
        ("CPU, one token apart", steady(0.8)),
        ("a fifth a token", steady(0.9)),
    ),
)
def test_within_five_per_cent_of_the_best_fixed_number(table, acceptance):
    """Over 200 tokens with nothing known beforehand, in the mean of many seeds, where drafting is far faster than plain."""
    seeds = range(24)
    assert mean_auto(table, acceptance, 8, seeds) <= 1.05 * best_fixed(table, acceptance, 8, seeds)


@pytest.mark.parametrize("table", ("CPU, fast", "CPU, slow", "a fifth a token"))
def test_where_drafting_gains_little_the_bound_costs_a_little_more(table):
    """At 1.35 to 1.7 times plain a run of rejections can use up the allowance, and the text is plain from there."""
    seeds = range(24)
    assert mean_auto(table, steady(0.7), 8, seeds) <= 1.08 * best_fixed(table, steady(0.7), 8, seeds)


@pytest.mark.parametrize("table", ("GPU, light drafter", "GPU, usual drafter", "CPU, fast", "CPU, slow"))
def test_within_five_per_cent_with_long_blocks_after_a_first_call(table):
    """A text of 200 tokens has some 20 rounds then: each round of learning would be 5%, and memory spares it."""
    first = DraftSchedule(16)
    simulate(table, steady(0.92), first, 99)
    auto = mean_auto(table, steady(0.92), 16, range(24), memory=first.statistics)
    assert auto <= 1.05 * best_fixed(table, steady(0.92), 16, range(24))


def test_a_drafter_that_becomes_good_is_found():
    """In the next 400 tokens more than half of the time that the best fixed number saves is saved."""
    table = "CPU, fast"
    late = []
    for seed in range(20):
        schedule = DraftSchedule(8)
        simulate(table, steady(0.0), schedule, seed, tokens=400)
        late.append(simulate(table, steady(0.85), schedule, seed, start=400, tokens=400)[0])
    best = best_fixed(table, steady(0.85), 8, range(20), start=400, tokens=400)
    plain = mean(simulate(table, steady(0.85), 0, s, start=400, tokens=400)[0] for s in range(20))
    assert mean(late) < best + 0.5 * (plain - best)


def test_a_drafter_that_turns_useless_is_dropped():
    """What it earned before, and what 400 tokens bring back, may be lost: less than was gained."""
    for seed in range(20):
        schedule = DraftSchedule(8)
        simulate("CPU, fast", steady(0.85), schedule, seed, tokens=400)
        seconds, plain, drafts = simulate("CPU, fast", steady(0.0), schedule, seed, start=400, tokens=400)
        assert seconds < 1.06 * plain and sum(map(bool, drafts[-100:])) <= 8, seed


# ----------------------------------------------------------------------------------------- disturbed measurements


def test_warm_up_does_not_mislead():
    """The first pass of every length and of the drafter takes twenty times as long: the rest is as without."""
    seeds = range(20)
    for table, acceptance in (("GPU, usual drafter", steady(0.8)), ("CPU, fast", steady(0.8))):
        rates = []
        for seed in seeds:
            schedule = DraftSchedule(8)
            warm_up = lambda kind, count, generator: 20 if count == 1 else 1  # noqa: E731
            simulate(table, acceptance, schedule, seed, tokens=100, disturb=warm_up)
            rates.append(simulate(table, acceptance, schedule, seed, start=100, tokens=200)[0])
        assert mean(rates) <= 1.08 * best_fixed(table, acceptance, 8, seeds, start=100), table


def test_rare_spikes_do_not_mislead():
    """One pass in a hundred takes ten times as long; plain decoding has as many of them."""
    spikes = lambda kind, count, generator: 10 if generator.random() < 0.01 else 1  # noqa: E731
    options = {"tokens": 600, "disturb": spikes}
    seeds = range(24)
    for table in ("GPU, usual drafter", "CPU, fast"):
        auto = mean_auto(table, steady(0.8), 8, seeds, **options)
        assert auto <= 1.07 * best_fixed(table, steady(0.8), 8, seeds, **options)
        useless = mean_auto(table, steady(0.0), 8, seeds, **options)
        plain = mean(simulate(table, steady(0.0), 0, s, **options)[0] for s in seeds)
        assert useless <= 1.05 * plain


@pytest.mark.parametrize("table", ("CPU, fast", "GPU, heavy drafter", "a fifth a token"))
def test_a_machine_that_speeds_up_is_noticed(table):
    """Other work beside the first 24 passes makes them half as slow again. With a T(1) from then each draft looks cheap."""

    def busy():
        passes = itertools.count(1)
        return lambda kind, count, generator: 1.5 if next(passes) <= 24 else 1

    for seed in range(20):
        plain = simulate(table, steady(0.3), 0, seed, disturb=busy())[0]
        seconds = simulate(table, steady(0.3), DraftSchedule(8), seed, disturb=busy())[0]
        assert seconds <= 1.03 * plain, seed


def test_jitter_is_not_taken_for_a_machine_that_speeds_up():
    """Half of the passes take 1.3 times as long as the others: plain rounds stay rare, and drafting pays as it does."""
    jitter = lambda kind, count, generator: 1.3 if generator.random() < 0.5 else 1  # noqa: E731
    for seed in range(8):
        drafts = simulate("GPU, usual drafter", steady(0.8), DraftSchedule(8), seed, tokens=600, disturb=jitter)[2]
        assert sum(n == 0 for n in drafts) < 0.1 * len(drafts), seed


def test_times_that_grow_with_the_context():
    options = {"tokens": 1000, "growth": 0.0005}
    for table in ("GPU, usual drafter", "CPU, fast"):
        auto = mean_auto(table, steady(0.75), 8, range(8), **options)
        assert auto <= 1.05 * best_fixed(table, steady(0.75), 8, range(8), **options)


def test_a_disturbed_first_plain_pass_is_measured_again():
    schedule = DraftSchedule(8)
    assert schedule.next() == 0
    schedule.observe(0, [0], 5.0)
    n = schedule.next()
    assert n > 0
    schedule.observe(n, [0], 1.1, 0.3)
    assert schedule.next() == 0
    schedule.observe(0, [0], 1.0)
    assert decode_schedule.plain_seconds(schedule.statistics) == 1.0


# ----------------------------------------------------------------------------------------- the pure functions


def known(table, counts, block_size=8):
    """Statistics of a table measured at every length, with many counts of each slot."""
    statistics = DraftStatistics(tried=[10000.0] * len(counts), accepted=[10000.0 * share for share in counts])
    for length in range(1, block_size + 1):
        for index in range(3):
            statistics.target.setdefault(length, Samples()).add(index, table[0](length))
            statistics.drafter.add(index, table[1])
    return statistics


def test_expected_tokens():
    statistics = known(TABLES["CPU, fast"], (0.8, 0.5, 0.25))
    assert expected_tokens(statistics, 3) == pytest.approx([1, 1.8, 2.2, 2.3], abs=1e-3)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("acceptance", (0.05, 0.3, 0.6, 0.8, 0.95))
def test_the_choice_is_the_best_by_the_formula(table, acceptance):
    target, drafter = TABLES[table]
    statistics = known(TABLES[table], (acceptance,) * 7)
    statistics.allowance = 100.0
    rates = {n: sum(acceptance**k for k in range(n + 1)) / (target(n + 1) + drafter) for n in range(1, 8)}
    n, gain = choose_num_draft(statistics, 7)
    assert rates[n] == pytest.approx(max(rates.values()), rel=1e-3)
    assert gain == pytest.approx(1 - 1 / target(1) / max(rates.values()), abs=1e-2)


def test_the_allowance_covers_the_worst_case():
    statistics = known(TABLES["linear, heavy drafter"], (0.99,) * 7)
    for allowance in (0.5, 2.0, 3.0, 5.0):
        statistics.allowance = allowance
        n, _ = choose_num_draft(statistics, 7)
        assert n == max((n for n in range(1, 8) if n + 1 <= allowance), default=0)


def test_untried_lengths_lie_between_measured_ones():
    statistics = DraftStatistics()
    for length, seconds in ((1, 1.0), (4, 1.3), (8, 2.1)):
        for index in range(2):
            statistics.target.setdefault(length, Samples()).add(index, seconds)
    times = target_seconds(statistics, 10)
    assert times[3] == pytest.approx(1.2) and times[6] == pytest.approx(1.7) and times[10] == pytest.approx(2.2)


def test_samples_fade_and_withstand_outliers():
    samples = Samples()
    for index, seconds in enumerate((1.0, 9.0, 1.1, 1.2, 9.0, 1.3)):
        samples.add(index, seconds)
    assert samples.median == 1.3 and len(samples) == 5
    samples.add(1000, 2.0)
    assert samples.median == 2.0 and len(samples) == 1


# ----------------------------------------------------------------------------------------- rows, settings, memory


def test_rows_are_counted_each():
    """What a round adds is the sum over rows; a slot is tried by the rows that reach it."""
    schedule = DraftSchedule(4)
    schedule.observe(0, [0, 0], 1.0, rows=2)
    before = schedule.statistics.allowance
    schedule.observe(3, [3, 0], 1.1, 0.4, rows=2)
    assert schedule.statistics.tried == [2, 1, 1] and schedule.statistics.accepted == [1, 1, 1]
    assert schedule.statistics.allowance == pytest.approx(before + 1.0)  # 2.5 tokens a row in 1.5 plain passes
    assert (schedule.statistics.first_tried, schedule.statistics.first_accepted) == (2, 1)


@pytest.mark.parametrize("setting", ((4, 100), (1, 2000)))
def test_times_move_with_rows_and_context(setting):
    """Where either has doubled, a plain pass is measured, and the other times are taken in proportion."""
    schedule = DraftSchedule(8)
    simulate("CPU, fast", steady(0.8), schedule, 0, tokens=100)
    before = target_seconds(schedule.statistics, 8)
    assert schedule.next(1, 100) > 0 and schedule.next(*setting) == 0
    schedule.observe(0, [0], 3 * before[1], 0.0, *setting)
    after = target_seconds(schedule.statistics, 8)
    assert after[8] / before[8] == pytest.approx(3, rel=0.1)
    assert schedule.next(*setting) > 0


def test_memory_is_copied_and_used():
    first = DraftSchedule(8)
    assert first.next(1, 50) == 0  # plain decoding's time is not known yet
    simulate("CPU, fast", steady(0.85), first, 0)
    rounds = first.statistics.rounds
    second = DraftSchedule(8, first.statistics)
    assert second.next(1, 50) > 3 and second.statistics.allowance == ALLOWANCE
    simulate("CPU, fast", steady(0.85), second, 1)
    assert first.statistics.rounds == rounds < second.statistics.rounds


def test_memory_of_a_useless_drafter_spares_most_tries():
    """Once twenty of its drafts have failed."""
    memory, tries = None, []
    for call in range(6):
        schedule = DraftSchedule(8, memory)
        drafts = simulate("GPU, usual drafter", steady(0.0), schedule, call)[2]
        tries.append(sum(map(bool, drafts)))
        memory = schedule.statistics
    assert 0 < tries[-1] <= 0.5 * tries[0], tries


def test_a_text_of_another_kind_is_tried_anew():
    """Short texts of two kinds in turns, as users send them: on the kind that pays, a good part of what the best fixed number
    saves is saved. A memory of the other kind that is believed for long, or a drafter pass that also reads what plain rounds
    wrote and is taken for its usual time, each cost most of it."""
    good, bad, options = steady(0.65), steady(0.3), {"tokens": 64, "catch_up": 0.02}
    spent = {"auto": 0.0, "fixed": 0.0, "plain": 0.0}
    memory = None
    for call in range(120):
        schedule = DraftSchedule(8, memory)
        seconds, plain, _ = simulate("CPU, slow", bad if call % 2 else good, schedule, call, **options)
        memory = schedule.statistics
        if call % 2 == 0:
            spent["auto"] += seconds
            spent["plain"] += plain
            spent["fixed"] += min(simulate("CPU, slow", good, n, call, **options)[0] for n in (3, 5, 7))
    assert spent["plain"] - spent["auto"] > 0.25 * (spent["plain"] - spent["fixed"]), spent


def test_a_block_of_one_draft():
    seconds, plain, drafts = simulate("GPU, light drafter", steady(0.9), DraftSchedule(2), 0)
    assert max(drafts) == 1 and seconds < 0.7 * plain


# ----------------------------------------------------------------------------------------- the warning


@pytest.mark.parametrize(
    ("tried", "accepted", "due"), ((0, 0, False), (19, 0, False), (20, 1, True), (20, 2, False), (500, 49, True))
)
def test_the_floor(tried, accepted, due):
    """Pitfall 92."""
    assert is_at_floor(tried, accepted) is due
