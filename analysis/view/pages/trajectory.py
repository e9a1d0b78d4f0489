"""Show one episode by steps: what the agent saw, wrote and did, and what that was worth.

The texts of tokens come from the run's own tokenizer. Everything else is in the panel's query.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from markupsafe import Markup, escape

from analysis.view.group_query import TERMS, group_steps
from analysis.view.html import html
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.panel import Panel
from analysis.view.png import picture_address
from analysis.view.shades import SHADES, shade_class
from analysis.view.sql_text import fill
from analysis.view.text import ACTION_CHARACTERS, visible
from analysis.view.token_texts import TokenTexts, token_texts

SHOWN_STEPS = 300  # of a long episode, around the step of the address
OPEN_STEPS = 12  # an episode of at most so many steps is shown open
TEXT_CHARACTERS = 20_000  # of an observation; the query without it gives the rest
REPLY_TOKENS = 2_000  # of one reply
PAGE_REPLY_TOKENS = 3_000  # of all replies; the step of the address is shown beyond that
PROMPT_TOKENS = 8_000  # of one prompt: its first and its last half
PAGE_PROMPT_TOKENS = 16_000  # of all prompts of a page
PAGE_PIXELS = 2_000_000  # of all images of a page
TRIED_ACTIONS = 6  # of the state, the best ones
TIME_WIDTH = 120.0  # of the bar of a step's time
PLAIN_PIECE = re.compile(r"[A-Za-z0-9 .,:;!?()_/-]+")  # needs no escape
# A token is darker the less probable it was: the smallest probability of each class.
LIKELY = ((0.9, "tok-0"), (0.5, "tok-1"), (0.2, "tok-2"), (0.05, "tok-3"), (0.0, "tok-4"))

FIND = """
SELECT group_uid FROM steps WHERE traj_uid = $traj GROUP BY group_uid
"""
NEWEST = """
SELECT group_uid FROM groups WHERE n_steps > 0 AND state <> 'open'
ORDER BY n_won BETWEEN 1 AND n_members - 1 DESC, state = 'trained' DESC, completed_at DESC
LIMIT 1
"""
FIRST_LOST = """
SELECT traj_uid FROM steps GROUP BY traj_uid ORDER BY bool_or(won), min(member) LIMIT 1
"""
EPISODE = """, attempts AS (
    SELECT traj_uid, any_value(member) AS member, any_value(won) AS won, count(*) AS steps,
           bool_or(truncated) AS truncated
    FROM steps GROUP BY traj_uid)
SELECT any_value(task_id) AS task_id, any_value(split) AS split, any_value(env_name) AS env_name,
       any_value(seed) AS seed, any_value(member) AS member, any_value(won) AS won,
       any_value(task_score) AS task_score, bool_or(truncated) AS truncated, count(*) AS steps,
       sum(reward) AS episode_return, count(*) FILTER (NOT is_action_valid) AS invalid_actions,
       min(version_min) AS version_min, max(version_max) AS version_max,
       count(*) FILTER (version_min <> version_max) AS mixed_replies,
       sum(gen_us) / 1e6 AS engine_s, sum(env_us) / 1e6 AS environment_s,
       sum(len(response_ids)) AS reply_tokens,
       (SELECT list({'member': member, 'traj_uid': traj_uid, 'won': won, 'steps': steps,
                     'truncated': truncated} ORDER BY member) FROM attempts) AS attempts
FROM steps WHERE traj_uid = $traj HAVING count(*) > 0
"""
TRANSCRIPT = """, rated AS (
    SELECT s.state_hash, left(s.action_text, $characters) AS action, count(*) AS visits,
           avg(a.step_return) AS mean_return
    FROM steps AS s JOIN terms AS a USING (traj_uid, step_index)
    WHERE s.state_hash IS NOT NULL GROUP BY ALL),
tried AS (
    SELECT state_hash, count(*) AS actions,
           list({'action': action, 'visits': visits, 'mean_return': mean_return}
                ORDER BY mean_return DESC, action)[:$tried] AS tried
    FROM rated GROUP BY state_hash)
SELECT s.step_index AS step, left(s.obs_text, $text) AS observation,
       len(s.obs_text) AS observation_length,
       left(s.anchor_text, $text) AS anchor, s.state_hash,
       left(s.action_text, $text) AS action, s.is_action_valid, s.reward, s.truncated,
       left(s.final_observation, $text) AS final_observation,
       s.terminated, s.finish_reason, s.admissible_actions[:200] AS possible,
       a.advantage, a.episode_advantage, a.step_advantage, a.step_return, a.anchor_size,
       t.tried, t.actions, s.version_min, s.version_max, s.gen_us, s.env_us,
       len(s.prompt_ids) AS prompt_tokens, s.prompt_dropped_turns, s.prompt_dropped_tokens,
       CASE WHEN s.step_index <> $step
                 AND sum(len(s.prompt_ids)) OVER so_far > $page_prompt_tokens THEN NULL
            WHEN len(s.prompt_ids) <= $prompt_tokens THEN s.prompt_ids
            ELSE s.prompt_ids[:$half] || s.prompt_ids[-$half:] END AS prompt_ids,
       len(s.response_ids) AS reply_tokens,
       if(s.step_index = $step
          OR sum(least(len(s.response_ids), $reply_tokens)) OVER so_far <= $page_reply_tokens,
          s.response_ids[:$reply_tokens], NULL) AS reply_ids,
       s.response_logprobs[:$reply_tokens] AS reply_logprobs,
       coalesce(len(s.images), 0) AS n_images,
       if(s.step_index = $step OR sum(coalesce(list_sum([
              image.height::BIGINT * image.width FOR image IN s.images]), 0)) OVER so_far
              <= $page_pixels, s.images, NULL) AS images
FROM steps AS s LEFT JOIN terms AS a USING (traj_uid, step_index)
LEFT JOIN tried AS t ON t.state_hash = s.state_hash
WHERE s.traj_uid = $traj AND s.step_index >= $from_step
WINDOW so_far AS (ORDER BY s.step_index)
ORDER BY s.step_index LIMIT $shown_steps
"""


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of one episode.

    An address that names none leads to a lost one of the newest group of mixed outcome.
    """
    trajectory, group = _found(asked)
    step = asked.integer("step")
    if step is not None and not 0 <= step < 2**31:
        raise BadAddressError("step is the number of a step, from 0")
    steps = group_steps(asked, group)
    return [
        Panel(
            title="Episode",
            explains="One attempt at a task: how it ended, what it cost, and the group's other "
            "attempts, with which it is compared.",
            query=fill(EPISODE, traj=trajectory),
            tables=[steps],
            show=partial(show_episode, asked, group, trajectory),
            empty="The run has no such episode at this moment.",
            width="full",
        ),
        Panel(
            title="Transcript",
            explains="What the agent saw, wrote and did at each step. Blue steps become more "
            "likely, orange ones less. The stronger a token is shaded, the less probable it was.",
            tables=[steps, TERMS],
            query=fill(
                TRANSCRIPT,
                traj=trajectory,
                step=-1 if step is None else step,
                from_step=max(0, (step or 0) - SHOWN_STEPS // 2),
                shown_steps=SHOWN_STEPS,
                characters=ACTION_CHARACTERS,
                text=TEXT_CHARACTERS,
                tried=TRIED_ACTIONS,
                half=PROMPT_TOKENS // 2,
                prompt_tokens=PROMPT_TOKENS,
                page_prompt_tokens=PAGE_PROMPT_TOKENS,
                reply_tokens=REPLY_TOKENS,
                page_reply_tokens=PAGE_REPLY_TOKENS,
                page_pixels=PAGE_PIXELS,
            ),
            show=partial(show_transcript, asked, group, trajectory, step),
            empty="The run has no such episode at this moment, or it has no such step.",
            width="full",
            keeps=False,  # the tokenizer is no part of the answer
        ),
    ]


def show_episode(
    asked: PageRequest, group: uuid.UUID, trajectory: uuid.UUID, table: pa.Table
) -> Markup:
    """Show how the episode ended, and lead to the group's other episodes."""
    row = table.slice(0, 1).to_pylist()[0]
    attempts = [
        {
            **attempt,
            "is_this": uuid.UUID(str(attempt["traj_uid"])) == trajectory,
            "link": asked.link("/trajectory", traj=str(attempt["traj_uid"])),
            "outcome": outcome(attempt),
        }
        for attempt in row["attempts"]
    ]
    here = next(at for at, attempt in enumerate(attempts) if attempt["is_this"])
    return html(
        "trajectory_episode.html",
        row=row,
        outcome=outcome(row),
        attempts=attempts,
        before=attempts[here - 1] if here else None,
        after=attempts[here + 1] if here + 1 < len(attempts) else None,
        group=asked.link("/group", group=group),
        task=asked.link("/task", task=row["task_id"]),
    )


def outcome(row: Mapping[str, Any]) -> str:
    """Return how an episode ended, in two words at most."""
    if row["won"]:
        return "won"
    return "cut off" if row["truncated"] else "lost"


def show_transcript(
    asked: PageRequest, group: uuid.UUID, trajectory: uuid.UUID, step: int | None, table: pa.Table
) -> Markup:
    """Show each step. That of the address is open, or all of a short episode."""
    rows = table.to_pylist()
    texts = token_texts(Path(asked.run))
    largest = max((abs(row["advantage"] or 0.0) for row in rows), default=0.0)
    longest_us = max((row["gen_us"] + row["env_us"] for row in rows), default=0)
    is_open = step is None and (len(rows) <= OPEN_STEPS or asked.text("open") == "all")
    numbers = [row["step"] for row in rows]

    def link(number: int) -> str:
        address = asked.link("/trajectory", traj=trajectory, step=number)
        return f"{address}#step-{number}"

    steps = []
    for at, row in enumerate(rows):
        state = row["state_hash"]
        steps.append(
            {
                **row,
                "is_open": is_open or row["step"] == step,
                "is_asked": row["step"] == step,
                "shade": shade_class(row["advantage"], largest),
                "mark": _mark(row),
                "link": link(row["step"]),
                "before": link(numbers[at - 1]) if at else None,
                "after": link(numbers[at + 1]) if at + 1 < len(rows) else None,
                "anchor_link": asked.link("/anchor", group=group, state=state) if state else None,
                "strip": reply_strip(row, texts),
                "prompt": prompt_html(row, texts),
                "pictures": _pictures(row),
                "compared": _compared(row),
                "engine": time_text(row["gen_us"]),
                "environment": time_text(row["env_us"]),
                "engine_width": _width(row["gen_us"], longest_us),
                "environment_width": _width(row["env_us"], longest_us),
            }
        )
    return html(
        "trajectory_steps.html",
        steps=steps,
        costliest=costliest(steps),
        largest=largest,
        omega=omega_of(rows),
        shades=[shade_class(shade / SHADES, 1.0) for shade in range(-SHADES, SHADES + 1)],
        likely=LIKELY,
        texts=texts,
        shown_characters=TEXT_CHARACTERS,
        open_all=asked.link("/trajectory", traj=trajectory, open="all"),
        n_closed=sum(not each["is_open"] for each in steps),
        is_all=step is None and len(rows) < SHOWN_STEPS,
    )


def omega_of(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the weight of the step advantage for which A = A_E + omega * A_S in every step.

    None if there is none: another estimator, or no step with a step advantage.
    """
    known = [row for row in rows if row["advantage"] is not None]
    weighed = max(known, key=lambda row: abs(row["step_advantage"]), default=None)
    if weighed is None or not weighed["step_advantage"]:
        return None
    omega = (weighed["advantage"] - weighed["episode_advantage"]) / weighed["step_advantage"]
    fits = all(
        math.isclose(
            row["advantage"],
            row["episode_advantage"] + omega * row["step_advantage"],
            rel_tol=1e-6,
            abs_tol=1e-6,
        )
        for row in known
    )
    return round(float(omega), 6) if fits else None


def costliest(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the step whose return was furthest below that of the best other action there.

    None if no other action was better in any state of the episode.
    """
    found = None
    for step in steps:
        best = (step["tried"] or [None])[0]
        if best is None or step["advantage"] is None or step["action"].startswith(best["action"]):
            continue
        lost = best["mean_return"] - step["step_return"]
        if lost > 0 and (found is None or lost > found["lost"]):
            found = {**step, "best": best, "lost": lost}
    return found


def time_text(time_us: int) -> str:
    """Return a time for people, with two or three digits."""
    if time_us >= 1_000_000:
        return f"{time_us / 1e6:.3g} s"
    return f"{time_us / 1e3:.0f} ms" if time_us >= 10_000 else f"{time_us / 1e3:.2g} ms"


def reply_strip(row: Mapping[str, Any], texts: TokenTexts) -> Markup | None:
    """Return the tokens of a reply, each shaded by its probability; None if they are left out."""
    ids = row["reply_ids"]
    if ids is None:
        return None
    parts = []
    # A stranger's row may have fewer probabilities than tokens.
    for number, logprob, piece in zip(ids, row["reply_logprobs"], texts.pieces(ids), strict=False):
        parts.append(_token(number, logprob, piece))
    if row["reply_tokens"] > len(ids):
        parts.append(
            f' <span class="quiet">… {row["reply_tokens"] - len(ids):,d} more tokens</span>'
        )
    return Markup("".join(parts))


def likelihood_class(logprob: float) -> str:
    """Return the class of a token by the probability with which it was sampled."""
    probability = math.exp(min(0.0, logprob)) if logprob == logprob else 0.0
    return next(name for least, name in LIKELY if probability >= least)


def prompt_html(row: Mapping[str, Any], texts: TokenTexts) -> Markup | None:
    """Return the prompt as the model saw it, None if it is left out."""
    ids = row["prompt_ids"]
    if ids is None:
        return None
    if row["prompt_tokens"] <= len(ids):
        return _prompt_text(ids, texts)
    half = len(ids) // 2
    return Markup('{}<span class="quiet">\n… {} tokens are left out here …\n</span>{}').format(
        _prompt_text(ids[:half], texts),
        f"{row['prompt_tokens'] - len(ids):,}",
        _prompt_text(ids[half:], texts),
    )


def _prompt_text(ids: Sequence[int], texts: TokenTexts) -> Markup:
    if not texts.is_known:
        return escape(" ".join(map(str, ids)))
    text = texts.text(ids)
    return visible(text, at_most=len(text))


def _token(number: int, logprob: float, piece: str | None) -> str:
    """Return one token as HTML. A page has thousands, so it is put together without a template."""
    if piece is None:
        shown = Markup('<span class="quiet">⟨{}⟩</span>').format(number)
    elif piece == "":
        shown = Markup('<span class="quiet">·</span>')
    elif PLAIN_PIECE.fullmatch(piece):
        shown = Markup(piece)
    else:
        marked = visible(piece, at_most=max(len(piece), 1))
        shown = Markup(str(marked).replace("\n", '<span class="quiet">↵</span>\n'))
    return (
        f'<span class="tok {likelihood_class(logprob)}" title="{logprob:.2f}: '
        f'{probability_text(logprob)}, token {number:d}">{shown}</span>'
    )


def probability_text(logprob: float) -> str:
    """Return the probability of a log-probability, for people."""
    if logprob != logprob:
        return "unknown"
    percent = 100 * math.exp(min(0.0, logprob))
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"


def _mark(row: Mapping[str, Any]) -> str:
    if not row["is_action_valid"]:
        return "×"
    if row["reward"]:
        return "+" if row["reward"] > 0 else "−"
    return ""


def _compared(row: Mapping[str, Any]) -> str:
    if row["state_hash"] is None:
        return "nothing: the step has no anchor state"
    others = (row["anchor_size"] or 1) - 1
    if others < 1:
        return "nothing: no other step of the group was in this state"
    return "1 other visit of this state" if others == 1 else f"{others} other visits of this state"


def _pictures(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for image in row["images"] or ():
        height, width = image["height"], image["width"]
        address = picture_address(image["pixels"], height=height, width=width)
        found.append({"address": address, "height": height, "width": width})
    return found


def _width(time_us: int, longest_us: int) -> float:
    return TIME_WIDTH * time_us / longest_us if longest_us else 0.0


def _found(asked: PageRequest) -> tuple[uuid.UUID, uuid.UUID]:
    """Return the episode of the address and its group. Raises BadAddressError."""
    trajectory = asked.uid("traj")
    if trajectory is not None:
        rows = asked.rows(fill(FIND, traj=trajectory))
        if not rows:
            raise BadAddressError(f"the run has no episode {trajectory} at this moment")
        return trajectory, uuid.UUID(rows[0]["group_uid"])
    newest = asked.rows(NEWEST)
    if not newest:
        return uuid.UUID(int=0), uuid.UUID(int=0)
    group = uuid.UUID(newest[0]["group_uid"])
    rows = asked.rows(FIRST_LOST, tables=[group_steps(asked, group)])
    return uuid.UUID(rows[0]["traj_uid"]) if rows else uuid.UUID(int=0), group


PAGE = Page(
    path="/trajectory",
    title="Trajectory",
    question="What did the agent see, write and do, and which steps get the credit?",
    panels=panels,
    follows=False,
    example="SELECT traj_uid AS traj, step_index AS step FROM steps "
    "ORDER BY t_start, traj_uid, step_index DESC LIMIT 1",
)
