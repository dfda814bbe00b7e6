"""Tools around jobs, which only commands import: conversion, rehearsal, simulation, report."""
