"""Tests of how a model is split, before anything is changed."""
