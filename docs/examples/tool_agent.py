"""An agent program with two tools. docs/agent_programs.md says how it is trained.

A coin lies under one of three cups. `lift` shows what is under a cup, `give` ends the episode.

    python tool_agent.py 500 > chats.jsonl    # chats of random play, for a warm start
"""

import json
import random
import sys

import openai

from envs import Outcome, Task

CUPS, COINS = ("red", "green", "blue"), ("gold", "silver", "copper")
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
            if (CUPS.index(cup) == COINS.index(coin)) == (split == "heldout")
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


def called(name, arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def main():
    draw = random.Random(0)
    for _ in range(int(sys.argv[1])):
        cup, lifted, coin = draw.choice(CUPS), draw.choice(CUPS), draw.choice(COINS)
        messages = [
            question(cup),
            called("lift", {"cup": lifted}),
            {
                "role": "tool",
                "tool_call_id": "lift",
                "content": coin if lifted == cup else "nothing",
            },
            called("give", {"coin": draw.choice(COINS)}),
        ]
        print(json.dumps({"messages": messages, "tools": TOOLS}))


if __name__ == "__main__":
    main()
