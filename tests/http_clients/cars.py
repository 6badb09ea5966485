"""A model of pydantic's as programs have them: nested, behind references, with null, lists and alternatives."""

from typing import Literal

from pydantic import BaseModel, Field


class Wheel(BaseModel):
    kind: Literal["wheel"]
    inches: Literal[15, 16]


class Door(BaseModel):
    kind: Literal["door"]
    is_new: bool


class Car(BaseModel):
    """A car."""

    main: Wheel
    other: Door | None
    parts: list[Wheel | Door] = Field(max_length=2)


QUESTION = "Describe the car."
