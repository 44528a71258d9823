"""How the tests are run: in processes that share them, of which one may die."""
