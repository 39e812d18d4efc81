"""Errors that name a field."""

import pickle

from stepserve.core.errors import FieldError


def test_a_field_error_comes_out_of_another_process_whole():
    error = pickle.loads(pickle.dumps(FieldError("control.margin", "must be positive")))
    assert (error.field, error.message) == ("control.margin", "must be positive")
    assert str(error) == "control.margin: must be positive"
