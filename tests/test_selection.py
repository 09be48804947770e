"""Which policies a daemon runs: selectors as kubectl reads them, and namespaces."""

from collections.abc import Mapping

import pytest

from autoscaler.errors import PolicyError
from autoscaler.policy_file import Loaded, Selection, parse_policies, parse_selector

LABELS = {"team": "search", "tier": "", "example.com/model": "llama-70b"}


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        pytest.param("", True, id="nothing-selects-all"),
        pytest.param("team=search", True, id="equal"),
        pytest.param("team == search", True, id="equal-twice-and-spaces"),
        pytest.param("team=ads", False, id="equal-to-another"),
        pytest.param("owner=ads", False, id="equal-of-an-absent-label"),
        pytest.param("team!=ads", True, id="not-equal"),
        pytest.param("team != search", False, id="not-equal-to-its-value"),
        pytest.param("owner!=ads", True, id="an-absent-label-differs"),
        pytest.param("team in (ads, search)", True, id="in"),
        pytest.param("team in(ads)", False, id="in-others"),
        pytest.param("owner in (ads)", False, id="in-of-an-absent-label"),
        pytest.param("team notin (ads,mail)", True, id="notin"),
        pytest.param("team notin (search)", False, id="notin-its-value"),
        pytest.param("owner notin (ads)", True, id="notin-of-an-absent-label"),
        pytest.param("team", True, id="exists"),
        pytest.param("owner", False, id="exists-not"),
        pytest.param("!owner", True, id="absent"),
        pytest.param("! team", False, id="absent-but-there"),
        pytest.param("tier=", True, id="empty-value"),
        pytest.param("team=", False, id="empty-value-of-another"),
        pytest.param("tier in (a,)", True, id="empty-value-in-a-list"),
        pytest.param("example.com/model=llama-70b", True, id="prefixed-key"),
        pytest.param("team in (ads,search),!owner, tier", True, id="all-terms-fit"),
        pytest.param("team in (ads,search),owner", False, id="one-term-does-not"),
    ],
)
def test_a_selector_fits_as_in_kubernetes(selector: str, fits: bool) -> None:
    assert all(term.fits(LABELS) for term in parse_selector(selector)) is fits


@pytest.mark.parametrize(
    ("selector", "word"),
    [
        pytest.param("team=a=b", "'a=b'", id="two-signs"),
        pytest.param("=a", "''", id="no-key"),
        pytest.param("team,", "''", id="an-empty-term"),
        pytest.param("team > 3", "'team > 3'", id="greater"),
        pytest.param("team in (a", "'team in (a'", id="no-end"),
        pytest.param("team in a", "'team in a'", id="no-list"),
        pytest.param("team=-a", "'-a'", id="value"),
        pytest.param("a/b/c", "'a/b/c'", id="key"),
        pytest.param("!team=a", "'team=a'", id="not-and-equal"),
    ],
)
def test_what_is_no_selector_is_said(selector: str, word: str) -> None:
    with pytest.raises(ValueError, match=r"is no label's (key|value); write a=b") as raised:
        parse_selector(selector)
    assert word in str(raised.value)


def loaded(**policies: tuple[str, str]) -> Loaded:
    """Return policies, each by its namespace and its labels in YAML."""
    documents = [
        "apiVersion: autoscaler/v1alpha1\nkind: ScalingPolicy\n"
        f"metadata: {{name: {name}, labels: {labels}}}\n"
        f"spec: {{target: {{namespace: {namespace}, deployment: {name}}}, replicas: {{max: 3}}}}\n"
        for name, (namespace, labels) in policies.items()
    ]
    return parse_policies("---\n".join(documents), "all.yaml")


THREE = loaded(chat=("web", "{team: a}"), code=("web", "{team: b}"), mail=("back", "{}"))


def selection(selector: str = "", *namespaces: str) -> Selection:
    return Selection(text=selector, terms=parse_selector(selector), namespaces=namespaces)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        pytest.param(selection(), ["chat", "code", "mail"], id="all"),
        pytest.param(selection("team=a"), ["chat"], id="label"),
        pytest.param(selection("team!=a"), ["code", "mail"], id="another-label-or-none"),
        pytest.param(selection("", "back"), ["mail"], id="namespace"),
        pytest.param(selection("", "back", "web"), ["chat", "code", "mail"], id="namespaces"),
        pytest.param(selection("team", "web"), ["chat", "code"], id="both"),
        pytest.param(selection("team=a", "back"), [], id="none"),
    ],
)
def test_a_selection_keeps_what_fits(chosen: Selection, names: list[str]) -> None:
    assert list(chosen.of(THREE).policies) == names


def test_each_policy_is_in_exactly_one_share_of_a_partition() -> None:
    shares = [selection(text).of(THREE).policies for text in ("team=a", "team notin (a)")]
    assert sorted(name for share in shares for name in share) == ["chat", "code", "mail"]


def test_selecting_nothing_says_what_there_is() -> None:
    with pytest.raises(PolicyError) as raised:
        selection("team=c", "web").needed(THREE)
    (problem,) = raised.value.problems
    assert problem.message == (
        "--selector team=c --namespace web selects none of the 3 policies; "
        "there are: chat in web (team=a); code in web (team=b); mail in back (no labels)"
    )


def test_of_many_policies_the_first_are_shown() -> None:
    many: Mapping[str, tuple[str, str]] = {f"p{number}": ("web", "{}") for number in range(9)}
    complaint = selection("team").complaint(loaded(**many))
    assert complaint.endswith("p7 in web (no labels); ...")
