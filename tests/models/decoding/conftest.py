import pytest

from rayrec.models.decoding import children


@pytest.fixture(scope="module", params=["a row for each prefix", "children over several rows"])
def rows_of_children(request):
    """Tries as uneven as this matters for are large; these are decoded as if they were."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "children over several rows":
            patch.setattr(children, "is_uneven", lambda trie, depth: depth > 0)
            patch.setattr(children, "SEGMENT", 2)
        yield
