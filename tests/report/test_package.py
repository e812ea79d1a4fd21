import pkgutil

import pytest

import foretell.report


def test_every_name_has_a_home_and_none_is_a_module() -> None:
    for name in foretell.report.__all__:
        assert callable(value := getattr(foretell.report, name)) or isinstance(value, tuple)
    modules = {module.name for module in pkgutil.iter_modules(foretell.report.__path__)}
    assert not modules & set(foretell.report.__all__)
    assert set(dir(foretell.report)) == set(foretell.report.__all__) == set(foretell.report._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'crad'"):
        _ = foretell.report.crad
