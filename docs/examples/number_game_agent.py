"""An agent program: it guesses a number, with the openai client. docs/agent_programs.md says how it
is trained.
"""

import re

import openai

from envs import Outcome, Task


class Agent:
    def __init__(self, options):
        self.highest, self.guesses = options["highest"], options["guesses"]

    @classmethod
    def tasks(cls, split, options):
        numbers = [
            n for n in range(1, options["highest"] + 1) if (n % 4 == 0) == (split == "heldout")
        ]
        return [
            Task(
                id=f"number-{n}",
                env_name="number_game",
                split=split,
                seed=n,
                data={"number": str(n)},
            )
            for n in numbers
        ]

    def run(self, task, client):
        # the one line that was changed
        model = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
        number = int(task.data["number"])
        messages = [
            {
                "role": "user",
                "content": f"Guess my number from 1 to {self.highest}. Reply with a number.",
            }
        ]
        for _ in range(self.guesses):
            reply = (
                model.chat.completions.create(model="policy", messages=messages)
                .choices[0]
                .message.content
            )
            found = re.search(r"\d{1,6}", reply)
            if found is None:
                hint = "That is no number."
            elif int(found[0]) == number:
                return Outcome(reward=1.0, won=True)
            else:
                hint = "Too low." if int(found[0]) < number else "Too high."
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": hint}]
        return Outcome(reward=0.0, won=False)
