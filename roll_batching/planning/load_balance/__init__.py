"""Algorithm "load_balance": few packs under the cap, balanced for what the layout waits for."""
