"""An agent program with two tools. docs/agent_programs.md says how it is trained.

A coin lies under one of three cups. `lift` shows what is under a cup, `give` ends the episode.

    python tool_agent.py 2000 > chats.jsonl    # chats of a careless player, for a warm start
"""

import json
import random
import sys

import openai

from envs import Outcome, Task

CUPS = ("red", "green", "blue")
COINS = ("gold", "silver", "copper", "iron", "tin", "brass")
# Part of the careless player's calls that are right on purpose; the others are any call. With 0.3
# the tiny policy does not learn from the chats that the answer is in the question and in what was
# found. Then a lift is worth nothing, and it learns to give a coin at once.
CARE = 0.7
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string", "enum": list(values)}},
                "required": [argument],
            },
        },
    }
    for name, description, argument, values in (
        ("lift", "See what is under a cup.", "cup", CUPS),
        ("give", "Say which coin it is, once.", "coin", COINS),
    )
]


def question(cup):
    return {"role": "user", "content": f"A coin is under the {cup} cup. Which?"}


class Agent:
    def __init__(self, options):
        self.calls = options["calls"]

    @classmethod
    def tasks(cls, split, options):
        pairs = [(cup, coin) for cup in CUPS for coin in COINS]
        return [
            Task(
                id=f"{cup}-{coin}",
                env_name="cups",
                split=split,
                seed=number,
                data={"cup": cup, "coin": coin},
            )
            for number, (cup, coin) in enumerate(pairs)
            if (CUPS.index(cup) == COINS.index(coin) % len(CUPS)) == (split == "heldout")
        ]

    def run(self, task, client):
        model = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
        cup, coin = task.data["cup"], task.data["coin"]
        messages = [question(cup)]
        for _ in range(self.calls):
            reply = model.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                given = json.loads(call.function.arguments)
                if call.function.name == "give":
                    won = given.get("coin") == coin
                    return Outcome(reward=float(won), won=won)
                found = coin if given.get("cup") == cup else "nothing"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
        return Outcome(reward=0.0, won=False)


def called(name, value):
    argument = {"lift": "cup", "give": "coin"}[name]
    function = {"name": name, "arguments": json.dumps({argument: value})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def careless_call(draw, right):
    if draw.random() < CARE:
        return right
    return draw.choice([("lift", draw.choice(CUPS)), ("give", draw.choice(COINS))])


def careless_play(draw):
    cup, coin = draw.choice(CUPS), draw.choice(COINS)
    messages = [question(cup)]
    name, value = careless_call(draw, ("lift", cup))
    messages.append(called(name, value))
    if name == "lift":
        found = coin if value == cup else "nothing"
        messages.append({"role": "tool", "tool_call_id": name, "content": found})
        right = found if found in COINS else draw.choice(COINS)
        messages.append(called(*careless_call(draw, ("give", right))))
    return messages


def main():
    draw = random.Random(0)
    for _ in range(int(sys.argv[1])):
        print(json.dumps({"messages": careless_play(draw), "tools": TOOLS}))


if __name__ == "__main__":
    main()
