"""Stage engines. Loaded by name in a replica's process only: nothing in the server imports this
package."""
