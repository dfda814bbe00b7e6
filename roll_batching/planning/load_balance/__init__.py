"""Algorithm "load_balance": few packs under the cap, with cost balanced for the parallel layout."""
