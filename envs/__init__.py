"""Environments in which agents act, behind one contract.

    base.py        the contract: Task, Observation, Transition, Environment, Program
    key_room.py    the smallest environment, to copy for one of your own
    registry.py    find a class by name
    options.py     check an environment's options
    validation.py  check an environment before a run, and everything that it returns
    errors.py      the errors of environments
    error_texts.py  any error in one line, with its place in the author's file
    current_directory.py  import a library that reads files of the current directory
    logs.py        logs that cost no episode if they cannot be written
    hosting/       child processes, pools, remembered answers, an HTTP server and its guards
    adapters/      environments of other packages, and of a server
    textworld/, alfworld/, webshop/, search/, sokoban.py
                   the environments of this project
    bm25.py        the word search of WebShop and of question answering

Nothing here knows tokens, prompts or models. Environments are reached by name, so that importing
this package loads no engine.
"""

import lazy_loader

# The public names stand in `__init__.pyi`. Each is imported when it is first used: a process that
# plays no episode needs no web server.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
