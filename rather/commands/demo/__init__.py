"""`rather demo`: the whole way on a laptop, in about a minute and without a network."""

from rather.commands.demo.run import run_demo

__all__ = ["run_demo"]
