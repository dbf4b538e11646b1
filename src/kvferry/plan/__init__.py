"""Which bytes go where, once per pair of peers and once per request: plan, proof, binding."""

from kvferry.plan.bind import SPARE, Binder, Binding, Copies, Fills, Loading, Request, Spans, bind
from kvferry.plan.choose import Fleet, Route, routes
from kvferry.plan.make import make_plan, make_plans
from kvferry.plan.prove import prove
from kvferry.plan.schema import Edge, Fill, Grain, Lane, Need, Plan, Run
from kvferry.plan.tiles import Tiles

__all__ = [
    "SPARE",
    "Binder",
    "Binding",
    "Copies",
    "Edge",
    "Fill",
    "Fills",
    "Fleet",
    "Grain",
    "Lane",
    "Loading",
    "Need",
    "Plan",
    "Request",
    "Route",
    "Run",
    "Spans",
    "Tiles",
    "bind",
    "make_plan",
    "make_plans",
    "prove",
    "routes",
]
