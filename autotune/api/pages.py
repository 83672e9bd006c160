"""Pages of a list: at most `limit` items after a cursor, and where the next page is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar
from urllib.parse import urlencode

from fastapi import Query, Request

from autotune.api.answers import Json

T = TypeVar("T")
DEFAULT_LIMIT, MOST_LIMIT = 50, 200

Limit = Annotated[int, Query(ge=1, le=MOST_LIMIT, description="Items of a page at most.")]
After = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=200,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="The page after this item: take it from `next` of the page before.",
    ),
]
AfterNumber = Annotated[int | None, Query(ge=0, le=2**53, description="The page after the item with this number.")]


def after_name(items: Sequence[T], name: Callable[[T], str], after: str | None, limit: int) -> list[T]:
    """Up to `limit` + 1 items whose name comes after the cursor, by name: one more than a page tells of the next."""
    ordered = sorted(items, key=name)
    return [item for item in ordered if after is None or name(item) > after][: limit + 1]


def page(
    request: Request,
    field: str,
    found: Sequence[T],
    limit: int,
    *,
    cursor: Callable[[T], object],
    data: Callable[[T], object],
) -> Json:
    """The answer with `found` cut to `limit`, a path to the `next` page or null, and a Link header (RFC 8288).

    Args:
        request: whose query the next one repeats.
        field: what the items are called.
        found: one item more than the page, where there is a next page.
        limit: items of the page.
        cursor: gives an item's place in the list.
        data: gives an item as plain data.
    """
    shown = list(found[:limit])
    following = None
    if len(found) > limit:
        query = [(key, value) for key, value in request.query_params.multi_items() if key != "after"]
        following = f"{request.url.path}?{urlencode([*query, ('after', str(cursor(shown[-1])))])}"
    headers = {"Link": f'<{following}>; rel="next"'} if following else {}
    return Json({field: [data(item) for item in shown], "next": following}, headers=headers)
