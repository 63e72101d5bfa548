"""Cached builders that the tests of filling ahead of time name, as a user's module would have them."""

import cudnn

import plancache
from tests import graphs


@plancache.cached(cases=[(32,), (64,)])
def product(handle, m):
    return graphs.matmul(handle, m=m)


@plancache.cached(cases=[()])
def attention(handle):
    return graphs.sdpa(handle)


@plancache.cached(cases=[(8,), (48,), (200,)])
def lengths(handle, m):
    return graphs.matmul(handle, m=m, is_dynamic_shape_enabled=True)


@plancache.cached(cases=[()])
def impossible(handle):
    return graphs.unsupported(handle)


@plancache.cached(cases=[("a",)])
def broken(handle, what):
    raise ValueError(f"no {what} here")


@plancache.cached(cases=[()], policy=cudnn.build_plan_policy.ALL)
def every(handle):
    return graphs.unary(handle)


@plancache.cached
def caseless(handle, m):
    return graphs.matmul(handle, m=m)


@plancache.cached(cases=[()])
def simple(handle):
    return graphs.unary(handle)
