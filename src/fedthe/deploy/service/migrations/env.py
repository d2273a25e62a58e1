"""Alembic runs this for every migration. `schema.migrate` gives the connection, in a transaction that it ends."""

from alembic import context

from fedthe.deploy.service.schema import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
