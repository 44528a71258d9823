"""Fields of a body: forms of values, the tables, and how both are read into messages of baton.v1; all APIs share
them."""
