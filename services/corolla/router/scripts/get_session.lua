-- Reads a session. ARGV: session id, tenant.
local record = owned(ARGV[1], ARGV[2])
if not record then return {'missing'} end
return found(ARGV[1], record)
