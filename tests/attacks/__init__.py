"""Tests of fedcluster/attacks."""
